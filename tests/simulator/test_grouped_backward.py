"""Groups of query heads that share keys, taken in parts by the Hopper backward kernel: dK and dV of the parts
are added up in float32, in one order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from captured_cases import Grid
from helpers import SMS, Width, forward_on_cpu, poisoned, widths
from test_captured_lengths import FIXED, ordered
from test_deterministic_backward import right
from test_simulated_backward import COMPOSED, gradients, judge
from test_simulated_captured import close as close_to_captured
from test_simulated_lengths import KINDS
from test_simulated_lengths import close as close_to_lengths
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.kernels.plan.groups import Groups
from ptxsim.doors.device import Gpu

TIMINGS = ("eager", "late", "random")


@contextmanager
def in_parts(parts: int) -> Iterator[None]:
    """Within, groups are taken in so many parts. Forward passes have none: they are the CPU's."""
    with forward_on_cpu(), patch.object(Groups, "parts", lambda *_: parts):
        yield


def drawn(heads: tuple[int, int], lengths: tuple[int, int], width: Width) -> list[Tensor]:
    """q, k, v and dout."""
    wide, wide_v = widths(width)
    queries, keys = ((n, length) for n, length in zip(heads, lengths, strict=True))
    sizes = (*queries, wide), (*keys, wide), (*keys, wide_v), (*queries, wide_v)
    return [torch.randn(1, *size).bfloat16() for size in sizes]


def sums(gpu: Gpu) -> int:
    """Launches that add up parts."""
    return sum("sum_parts" in result.kernel for result in gpu.results)


CASES: list[tuple[str, tuple[int, int], int, Width]] = [
    ("alibi, causal", (4, 1), 2, 64),
    ("plain", (7, 1), 7, 128),
    ("softcap, window", (8, 1), 4, 64),
    ("documents", (8, 2), 2, 128),
    ("empty rows", (4, 2), 2, 64),
    ("sinks", (4, 2), 2, 192),
    ("unseen keys", (4, 1), 4, (192, 128)),
]
"""Composition, heads of queries and of keys, parts, width. Masks by query intervals and by tables, blocks
that are persistent and blocks that are not, dK and dV by the copy engine and by threads, and by columns."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads", "parts", "width"), CASES)
def test_gradients_in_parts(name: str, heads: tuple[int, int], parts: int, width: Width) -> None:
    q, k, v, dout = drawn(heads, (130, 200), width)
    dlse, timing, seed = torch.randn(1, heads[0], 130), random.choice(TIMINGS), random.randrange(99)
    attn = fa4flex.compile(**COMPOSED[name])
    with poisoned(), in_parts(parts), ptxsim.device("sm_90a", seed, timing, sms=SMS) as gpu:
        got = gradients(attn, (q, k, v), dout, dlse)
    where = f"{name}, {heads} heads in {parts} parts, width {width}, {timing} {seed}"
    assert sums(gpu) == 1 and not gpu.findings, f"{where}: {gpu.report()}"
    judge(where, COMPOSED[name], got, ((q, k, v), dout, dlse))


@pytest.mark.slow
def test_bits_of_dk_and_dv_are_the_same_in_every_timing() -> None:
    """dQ is added up in any order, dK and dV of parts in one."""
    q, k, v, dout = drawn((4, 1), (70, 200), 64)
    attn, found = fa4flex.compile(**COMPOSED["plain"]), []
    for timing in TIMINGS:
        with in_parts(4), ptxsim.device("sm_90a", random.randrange(99), timing, together=4) as gpu:
            found.append(gradients(attn, (q, k, v), dout, torch.zeros(1, 4, 70)))
        assert sums(gpu) == 1 and not gpu.findings, f"{timing}: {gpu.report()}"
    assert all(torch.equal(x, y) for one in found[1:] for x, y in zip(found[0][1:], one[1:], strict=True))


@pytest.mark.slow
def test_one_part_is_one_launch_less() -> None:
    """Heads within rows; dK and dV are then written where they belong."""
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in drawn((4, 2), (70, 130), 64))
    attn, found = fa4flex.compile(**COMPOSED["alibi, causal"], layout="bshd"), {}
    for parts in (1, 2):
        with poisoned(), in_parts(parts), ptxsim.device("sm_90a", sms=SMS) as gpu:
            found[parts] = gradients(attn, (q, k, v), dout, torch.zeros(1, 4, 70))
        assert sums(gpu) == parts - 1 and not gpu.findings, gpu.report()
    given = tuple(x.transpose(1, 2) for x in (q, k, v, dout))
    for parts, got in found.items():
        assert all(x.is_contiguous() for x in got)
        rows = [x.transpose(1, 2) for x in got]
        judge(f"{parts} parts", COMPOSED["alibi, causal"], rows, (given[:3], given[3], torch.zeros(1, 4, 70)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_in_parts(kind: str) -> None:
    with in_parts(2):
        close_to_lengths("alibi, causal", kind, 64, "sm_90a")


@pytest.mark.slow
def test_ordered_sums_in_parts() -> None:
    """Parts begin in the order of their tiles of keys, so that blocks wait for none that is yet to come."""
    with in_parts(2):
        right("sm_90a", "causal", random.choice(("dense", "packed")))


@pytest.mark.slow
def test_captured_tensors_in_parts() -> None:
    """A query head's share is its own, whichever part it is in."""
    with in_parts(2):
        close_to_captured(random.choice(("slopes", "dense, hidden tiles")), Grid(1, 2, 70, 129), 64, "sm_90a")


@pytest.mark.slow
def test_ordered_sums_of_captured_tensors_in_parts() -> None:
    """Every warp of every part has memory of its own."""
    with in_parts(2):
        ordered("sm_90a", random.choice(FIXED), [("eager", 0), ("random", random.randrange(99))])
