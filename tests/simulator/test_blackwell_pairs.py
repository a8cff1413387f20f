"""Gradients by pairs of CTAs of a simulated B200: right, and nothing found; what a tile costs them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import captured_cases
import pytest
import test_captured_lengths as captured_ragged
import test_deterministic_backward as ordered
import test_simulated_captured as captured
import torch
from captured_cases import Grid
from helpers import forward_on_cpu
from pairs import in_pairs
from test_backward_clocks import PASSES, TILE, backward, more_per_tile
from test_blackwell_backward_counts import arithmetic
from test_simulated_backward import COMPOSED, close
from test_simulated_lengths import COMPOSED as RAGGED
from test_simulated_lengths import KINDS
from test_simulated_lengths import close as close_ragged

import fa4flex
import ptxsim
from fa4flex.kernels.plan.specialize import long_scores
from fa4flex.variants import alibi, softcap
from ptxsim.run.counts import cycles, shared_memory
from ptxsim.run.launch import Result

KEYS = 256
"""Keys per tile of a CTA pair."""
HALVES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 104, (64, 128), (128, 40))
LENGTHS = ((1, 1), (1, 130), (130, 1), (127, 257), (257, 127), (130, 200), (200, 384), (384, 256))


def check(name: str, lengths: tuple[int, int]) -> None:
    if name == "documents":  # has ids of so many
        lengths = min(lengths[0], 200), min(lengths[1], 200)
    kv_heads, dtype = random.choice((1, 2, 4)), random.choice(HALVES)
    with in_pairs(), forward_on_cpu():
        close(name, *lengths, random.choice(WIDTHS), "sm_100a", kv_heads, dtype)


@pytest.mark.slow
def test_some_gradients() -> None:
    check(random.choice(sorted(COMPOSED)), random.choice(LENGTHS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gradients(name: str, lengths: tuple[int, int]) -> None:
    check(name, lengths)


# The second CTA of a pair has none of a tile's 256 keys in some sequences, and one in others.


@pytest.mark.slow
def test_some_lengths() -> None:
    with in_pairs(), forward_on_cpu():
        close_ragged(random.choice(sorted(RAGGED)), random.choice(KINDS), random.choice(WIDTHS), "sm_100a")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RAGGED)
def test_lengths(name: str, kind: str) -> None:
    with in_pairs(), forward_on_cpu():
        close_ragged(name, kind, random.choice(WIDTHS), "sm_100a")


@pytest.mark.exhaustive
def test_sums_in_any_order_show() -> None:
    with in_pairs(), forward_on_cpu():
        ordered.in_any_order("sm_100a", KEYS)


@pytest.mark.slow
def test_ordered_sums_repeat() -> None:
    with in_pairs(), forward_on_cpu():
        ordered.same("sm_100a", random.choice(ordered.TELLING), 1, KEYS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ordered.MASKS)
def test_ordered_sums_repeat_often(name: str) -> None:
    with in_pairs(), forward_on_cpu():
        ordered.same("sm_100a", name, 12, KEYS)


def check_ordered(name: str, kind: str) -> None:
    with in_pairs(), forward_on_cpu():
        ordered.right("sm_100a", name, kind, random.choice((64, 128)))


@pytest.mark.slow
def test_some_ordered_sums() -> None:
    check_ordered(random.choice(sorted(ordered.MASKS)), random.choice(("dense", "packed", "padded")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ("dense", "packed", "padded"))
@pytest.mark.parametrize("name", ordered.MASKS)
def test_ordered_sums(name: str, kind: str) -> None:
    check_ordered(name, kind)


def check_captured(name: str) -> None:
    grid = Grid(1, 2, random.choice((70, 130, 200)), random.choice((129, 200, 300)))
    with in_pairs(), forward_on_cpu():
        captured.close(name, grid, random.choice(WIDTHS), "sm_100a")


@pytest.mark.slow
def test_some_captured() -> None:
    check_captured(random.choice(sorted(captured_cases.CASES)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", captured_cases.CASES)
def test_captured(name: str) -> None:
    check_captured(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", captured_ragged.CASES)
def test_captured_and_lengths(name: str, kind: str, deterministic: bool) -> None:
    with in_pairs(), forward_on_cpu():
        in_order = deterministic and name in captured_ragged.FIXED
        captured_ragged.close("sm_100a", name, kind, random.choice((64, 128)), in_order)


@pytest.mark.slow
def test_captured_repeat() -> None:
    """Each warp of both CTAs has a copy to itself: it adds twice to an element of a sequence, and if two
    warps did, four numbers would come in any order."""
    timings = [("eager", 0), *(("random", random.randrange(99)) for _ in range(3))]
    with in_pairs(), forward_on_cpu():
        captured_ragged.ordered("sm_100a", "per sequence", timings)


def test_where_scores_are_long_in_the_making() -> None:
    of_key, of_head = torch.zeros(8), torch.zeros(4)
    mods: list[tuple[bool, Any]] = [
        (False, alibi),
        (False, lambda s, b, h, q, k: s * of_head[h] + (q - k) * of_head[h]),
        (True, lambda s, b, h, q, k: s + of_key[k]),
        (True, lambda s, b, h, q, k: s + of_key[q // 2]),
        (True, softcap(20.0)),
    ]
    for long, mod in mods:
        assert long_scores(fa4flex.compile(score_mod=mod).prepared.engine.facts) == long


@cache
def own(q_len: int) -> Result:
    """The main kernel of the backward of 256 keys, which a pair has."""
    q = torch.randn(1, 1, q_len, 128).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 1, 256, 128).bfloat16().requires_grad_() for _ in range(2))
    with in_pairs(), ptxsim.device("sm_100a", timing="eager") as gpu:
        out = fa4flex.compile()(q, k, v)
        out.backward(torch.randn_like(out))
    assert not gpu.findings
    _, _, found, _ = gpu.results
    assert found.shape.cluster == (2, 1, 1)
    return found


@pytest.mark.slow
def test_clocks_of_the_paper() -> None:
    """MMA 2560 and exponentials 1024 (Zadouri et al. 2026, Table 3). Of shared memory, it halves the second
    operand of all products and nothing else, 2688; here, as for flash-attn-4's kernel, dQ's rows are divided
    between the CTAs as well: less to write and to read, for more operands. dS, half of which is the other
    CTA's, is written once: there are no copies of it, which are clocks less than flash-attn-4's."""
    units, moved = (more_per_tile(f, own(256), own(512)) for f in (cycles, shared_memory))
    assert units["mma"] == 2560 and units["special functions"] == 1024
    assert moved["operands of MMAs"] == 2 * 1.5 * TILE + 2 * 0.5 * TILE + 2 * TILE
    assert moved["stores"] == TILE + TILE and moved["copies out"] == TILE
    assert moved["copies between CTAs"] == moved["updates"] == 0
    counted = moved["operands of MMAs"] + moved["stores"] + moved["copies out"]
    assert counted == PASSES[True] - 2 * TILE + TILE // 2 == 2304


@pytest.mark.slow
def test_no_more_than_flash_attention_4() -> None:
    peer = backward(256, True), backward(512, True)
    for of, units in (
        (cycles, ("mma", "shared memory", "special functions", "fp32")),
        (
            shared_memory,
            ("operands of MMAs", "loads", "stores", "copies in", "copies out", "copies between CTAs"),
        ),
        (arithmetic, ("results",)),
    ):
        ours, theirs = more_per_tile(of, own(256), own(512)), more_per_tile(of, *peer)
        for unit in units:
            assert ours[unit] <= theirs[unit], unit
    assert more_per_tile(cycles, own(256), own(512))["shared memory"] < 3100
