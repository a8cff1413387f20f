"""The clocks that a tile costs flash-attn-4's backward, beside its paper's table and a derivation by hand.

Each 128 x 128 tile of head width 128 and its share of the copies: what a launch of more queries costs in
addition, so that what is done once for a tile of keys does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import numpy as np
import peers
import pytest
import torch

from ptxsim.doors.device import Gpu
from ptxsim.isa.access import bandwidth
from ptxsim.run.counts import cycles, shared_memory
from ptxsim.run.launch import Result

TILE = 256
"""Clocks in which 128 x 128 numbers of 16 bits pass through shared memory, 128 bytes at a time."""
ROWS = 2 * 128 * 4 // 128
"""Clocks in which a tile's 128 LSEs and as many row sums of dO O, in fp32, pass through shared memory."""
PASSES = {False: 3328, True: 2688}
"""The paper's clocks of shared memory, without and with pairs of CTAs."""


@cache
def backward(q_len: int, pairs: bool) -> Result:
    """The main kernel of the backward of 256 keys: two tiles, in two CTAs or in a pair."""
    gpu = Gpu("sm_100a", "eager", 0)
    q = torch.randn(1, q_len, 1, 128).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 256, 1, 128).bfloat16().requires_grad_() for _ in range(2))
    chosen = patch("flash_attn.cute.utils._fa_disable_2cta_enabled", not pairs)
    with peers.flash_attention("sm_100a", gpu.run, sms=2) as fa4, chosen:
        out, _ = fa4.flash_attn_func(q, k, v)
        out.backward(torch.randn_like(out))
    (found,) = [result for result in gpu.results if "bwd_sm100" in result.kernel]
    assert found.shape.cluster == ((2, 1, 1) if pairs else (1, 1, 1))
    return found


def more_per_tile(
    counted: Callable[[Result], dict[str, float]], few: Result, many: Result
) -> dict[str, float]:
    """Cost of each of the tiles that 256 more queries make of 256 keys."""
    tiles = 2 * (512 - 256) // 128
    before, after = counted(few), counted(many)
    return {key: (after[key] - before[key]) / tiles for key in after}


@cache
def of_a_tile(pairs: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Clocks of each unit, and of shared memory by what moves through it."""
    few, many = backward(256, pairs), backward(512, pairs)
    return more_per_tile(cycles, few, many), more_per_tile(shared_memory, few, many)


@pytest.mark.parametrize(
    ("stride", "width", "clocks"),
    [
        (4, 4, 1),
        (0, 4, 1),
        (0, 16, 1),
        (16, 16, 4),
        (8, 8, 2),
        (8, 4, 2),
        (128, 4, 32),
        (132, 4, 1),
        (2, 2, 1),
    ],
)
def test_banks(stride: int, width: int, clocks: int) -> None:
    """Clocks in which 32 lanes access `width` bytes each, `stride` bytes apart."""
    assert bandwidth(np.arange(32) * stride, width) == 128 * clocks


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True], ids=["one CTA", "two CTAs"])
def test_arithmetic(pairs: bool) -> None:
    """Five products of 128 x 128 x 128, and 128 x 128 exponentials, all on their own unit."""
    units, _ = of_a_tile(pairs)
    assert units["mma"] == 2560
    assert units["special functions"] == 1024


def test_shared_memory_of_one_cta() -> None:
    """Both operands of S, dP and dQ come from shared memory, and one of dV and of dK. dS is written, dQ
    written and read in fp32."""
    _, moved = of_a_tile(False)
    assert moved["operands of MMAs"] == 3 * 2 * TILE + 2 * TILE
    assert moved["stores"] == TILE + 2 * TILE
    assert moved["copies out"] == 2 * TILE
    assert moved["operands of MMAs"] + moved["stores"] + moved["copies out"] == PASSES[False]
    assert_left_out(moved)


def test_shared_memory_of_two_ctas() -> None:
    """Each CTA reads half of every second operand: B. For dQ of its 64 rows it reads 64 x 256 numbers of dS
    and of K. Half of dS goes to the other CTA: it is read here, and as much is written by the other one."""
    _, moved = of_a_tile(True)
    assert moved["operands of MMAs"] == 2 * 1.5 * TILE + 2 * 0.5 * TILE + 2 * TILE
    assert moved["stores"] == TILE + TILE
    assert moved["copies between CTAs"] == 2 * 0.5 * TILE
    assert moved["copies out"] == TILE
    assert_left_out(moved)


def test_the_paper_counts_pairs_otherwise() -> None:
    """Its number halves B of all five products and nothing else. The kernel has dQ's rows divided between the
    CTAs as well: less to write and to read, for more operands and the exchange of dS."""
    _, moved = of_a_tile(True)
    counted = sum(moved[key] for key in ("operands of MMAs", "stores", "copies between CTAs", "copies out"))
    assert PASSES[True] == PASSES[False] - 5 * TILE // 2
    assert counted == PASSES[True] - 2 * TILE + TILE // 2 + TILE == 2560


def assert_left_out(moved: dict[str, float]) -> None:
    """Checks what the paper's table leaves out: tiles that come in (with pairs, halves of Q and dO and of
    their transposes), and the 8 warps' broadcast loads of 16 bytes, each of 64 rows' numbers."""
    assert moved["copies in"] == 2 * TILE + ROWS
    assert moved["loads"] == 8 * 2 * 64 * 4 // 16
    assert moved["updates"] == 0
