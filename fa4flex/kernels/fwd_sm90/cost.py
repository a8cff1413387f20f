"""Cost: what a step of the Hopper forward kernel asks of each unit. Data only.

A warpgroup reads 64 rows of queries and all keys from shared memory for scores, and all values for the
output; probabilities are in registers.
"""

from __future__ import annotations

from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.plan.model import SHARED_BYTES, Units
from fa4flex.kernels.plan.problem import MMA_K, Problem
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.work import Work

ROWS = 64
"""Queries of a warpgroup."""


def forward_units(tiles: Tiles, problem: Problem, work: Work, target: Target) -> Units:
    """Clocks of each unit for a step of one block."""
    m, n = tiles.tile_m, tiles.tile_n
    d, dv = tiles.head_dim * tiles.itemsize, tiles.head_dim_v * tiles.v_itemsize
    # Products of 8 bits take half the time of as many of 16.
    flops = 2 * m * n * (problem.depths[0] * MMA_K + dv // 2)
    copied = n * (d + dv)
    operands = tiles.consumers * ((ROWS + n) * d + n * dv)
    return Units(
        tensor=flops / target.tensor_flops,
        special=work.special * m * n / target.special_results,
        fp32=work.fp32 * m * n / target.fp32_results,
        shared=(operands + copied) / SHARED_BYTES,
        read=copied,
    )


def exposed_share(units: Units, consumers: int, exposed: float) -> float:
    """Share of exponentials and arithmetic that no product hides: the less the longer products are beside
    them, and the more warpgroups take turns."""
    return exposed / consumers * (units.special + units.fp32) / max(units.tensor, 1.0)
