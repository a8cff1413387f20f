"""Cost of a tile in the Blackwell backward: the paper's Table 3, and at most what FlashAttention-4's costs.

Each 128 x 128 tile of head width 128 and its share of the copies, as in test_backward_clocks.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from test_backward_clocks import PASSES, ROWS, TILE, backward, more_per_tile

import fa4flex
import ptxsim
from ptxsim.run.counts import by_warp, cycles, shared_memory
from ptxsim.run.launch import Result


@cache
def own(q_len: int, dim: int = 128) -> Result:
    """The main kernel of the backward of 256 keys, whose tiles two CTAs have. dim: of q and k."""
    q = torch.randn(1, 1, q_len, dim).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 1, 256, d).bfloat16().requires_grad_() for d in (dim, 128))
    with ptxsim.device("sm_100a", timing="eager") as gpu:
        out = fa4flex.compile()(q, k, v)
        out.backward(torch.randn_like(out))
    assert not gpu.findings
    _, _, found, _ = gpu.results
    return found


def arithmetic(result: Result) -> dict[str, float]:
    """float32 results of sums, products and multiply-adds of all warps; packed ones count twice."""
    total = sum(by_warp(result).values(), Counter())
    return {"results": float(2 * total["float arithmetic, packed"] + total["float arithmetic"])}


@pytest.mark.slow
def test_clocks_of_the_paper() -> None:
    """MMA 2560, shared memory 3328, exponentials 1024 (Zadouri et al. 2026, Table 3)."""
    units, moved = (more_per_tile(f, own(256), own(512)) for f in (cycles, shared_memory))
    assert units["mma"] == 2560 and units["special functions"] == 1024
    assert moved["operands of MMAs"] == 3 * 2 * TILE + 2 * TILE
    assert moved["operands of MMAs"] + moved["stores"] + moved["copies out"] == PASSES[False]


@pytest.mark.slow
def test_no_more_than_flash_attention_4() -> None:
    peer = backward(256, False), backward(512, False)
    for of, units in (
        (cycles, ("mma", "shared memory", "special functions", "fp32")),
        (shared_memory, ("operands of MMAs", "loads", "stores", "copies in", "copies out")),
        (arithmetic, ("results",)),
    ):
        ours, theirs = more_per_tile(of, own(256), own(512)), more_per_tile(of, *peer)
        for unit in units:
            assert ours[unit] <= theirs[unit], unit


@pytest.mark.slow
def test_clocks_of_wide_heads() -> None:
    """Heads of (192, 128) take five products with the operands that each must read from shared memory, dS and
    dQ that pass through it, and tiles that come in: turns in tensor memory cost no second read."""
    units, moved = (more_per_tile(f, own(256, 192), own(512, 192)) for f in (cycles, shared_memory))
    wide = 3 * TILE // 2
    assert units["mma"] == (3 * 192 + 2 * 128) * 4 and units["special functions"] == 1024
    assert moved["operands of MMAs"] == 2 * wide + 2 * TILE + TILE + wide + TILE + wide
    assert moved["stores"] == TILE + 2 * wide and moved["copies out"] == 2 * wide
    assert moved["copies in"] == wide + TILE + ROWS
    assert units["shared memory"] == 5256
