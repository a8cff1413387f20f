"""Gradients of every variant and of every mod of attention-gym on a simulated B200, by one CTA and by pairs:
right, and nothing found. What they start from, out and lse, is the CPU executor's; test_blackwell_forward.py
has those of kernels.

A run takes a random sample; `-m exhaustive` takes all of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from unittest.mock import patch

import pytest
import torch
from blackwell import DRAWS, SMALL, TIMINGS, gym
from captured_cases import Grid
from helpers import of_passes, poisoned
from numeric import cuda_cases
from numeric.cuda_cases import Composition, Sizes, check_gradients, on_device
from pairs import in_pairs
from test_simulated_captured import right

import ptxsim

Width = tuple[int, int]
WIDTHS: tuple[Width, ...] = ((64, 64), (128, 128), (96, 96), (64, 128), (40, 72))
WIDEST: tuple[Width, ...] = ((256, 256), (200, 136), (64, 256))
EVERY = dict(zip((*DRAWS, *gym()), cycle(WIDTHS)))
"""Head widths in turn, for variants by name and for mods by kind and name. One variant has its own."""

LEARNED = [key for key, x in gym().items() if x.differentiable]


def made(key: str | tuple[str, str], width: Width) -> tuple[Sizes, Composition]:
    if isinstance(key, tuple):
        x = gym()[key]
        fixed = on_device(x.fn, torch.device("cpu"))  # of learned tables, too, no gradients are asked
        return Sizes(x.B, x.H, x.H, x.q_len, x.kv_len).wide(*width), {key[0]: fixed}
    draw = DRAWS[key]
    small = SMALL if draw.sizes(SMALL).q_len == SMALL.q_len else replace(SMALL, batch=1)
    with patch.object(cuda_cases, "DEVICE", torch.device("cpu")):
        sizes = draw.sizes(small.wide(*width))
        return sizes, draw.make(sizes)


@contextlib.contextmanager
def launched(timing: str, seed: int, clusters: list[int]) -> Iterator[None]:
    """Asserts that gradients within are made by kernels in clusters of so many CTAs."""
    by = in_pairs() if 2 in clusters else contextlib.nullcontext()
    with by, poisoned(), ptxsim.device("sm_100a", seed, timing) as gpu:
        yield
    assert not gpu.findings, gpu.report()
    assert [found.shape.cluster[0] for found in of_passes(gpu)] == clusters


def check(key: str | tuple[str, str], width: Width, ctas: int = 1) -> None:
    """Checks one call; a failure's output and seed repeat it. CTA pairs have no heads wider than 128."""
    sizes, composition = made(key, width)
    timing, seed = random.choice(TIMINGS)
    print(f"{key}, {sizes.dim} and {sizes.dim_v} wide, {ctas} CTAs: {timing} {seed}")
    # Wider heads have a kernel of one CTA alone, and wider ones yet two.
    main = [ctas if sizes.dim <= 128 else 1] * (2 if sizes.dim > 192 or sizes.dim_v > 128 else 1)
    before = [1] if key in IN_KERNELS else [1, 1]
    clusters = [*before, *main, 1]
    check_gradients(sizes, composition, launched(timing, seed, clusters))


@pytest.mark.slow
@pytest.mark.parametrize("ctas", [1, 2])
def test_some(ctas: int) -> None:
    check(random.choice(list(EVERY)), random.choice(WIDTHS), ctas)


IN_KERNELS = [key for key in EVERY if key[:5] not in ("gated", "head_")]
"""Compositions without output functions, whose gradients are a launch before those of attention."""


@pytest.mark.slow
def test_some_of_two_kernels() -> None:
    check(random.choice(IN_KERNELS), random.choice(WIDEST))


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", IN_KERNELS, ids=str)
def test_every_of_two_kernels(key: str | tuple[str, str]) -> None:
    check(key, random.choice(WIDEST))


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", EVERY, ids=str)
@pytest.mark.parametrize("ctas", [1, 2])
def test_every(key: str | tuple[str, str], ctas: int) -> None:
    check(key, EVERY[key], ctas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", [key for key in LEARNED if not key[1].startswith("mla_rope")], ids=str)
def test_learned_tables(key: tuple[str, str]) -> None:
    """Their gradients, too, which pairs of CTAs do not add up. Those of dot products are PyTorch's: they are
    more reads than a kernel adds up."""
    x = gym()[key]
    grid = Grid(1, x.H, 70, 130)
    right(x.name, {key[0]: x.fn}, list(x.differentiable), grid, random.choice((64, 128)), "sm_100a")


def test_nothing_is_left_out() -> None:
    assert {name.rsplit(" ", 1)[0] for name in DRAWS} >= set(cuda_cases.VARIANTS) and len(DRAWS) > 40
    assert not gym() or (len(gym()) == 41 and len(LEARNED) == 4)
