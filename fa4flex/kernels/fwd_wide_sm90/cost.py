"""Cost: what a step of the Hopper forward kernel for wide heads asks of each unit. Data only.

Both warpgroups read all queries, and each its part of the keys and its columns of the values; probabilities
are written once and read by both.
"""

from __future__ import annotations

from fa4flex.kernels.fwd_sm90.cost import forward_units
from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.fwd_wide_sm90.config import HALVES, ROWS
from fa4flex.kernels.plan.model import SHARED_BYTES, Units
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.work import Work


def wide_units(tiles: Tiles, problem: Problem, work: Work, target: Target) -> Units:
    """Clocks of each unit for a step of one block."""
    n, d, dv = tiles.tile_n, tiles.head_dim * tiles.itemsize, tiles.head_dim_v * tiles.itemsize
    probabilities = (1 + HALVES) * ROWS * n * tiles.itemsize
    operands = HALVES * ROWS * d + n * (d + dv)
    copied = n * (d + dv)
    shared = (operands + probabilities + copied) / SHARED_BYTES
    return forward_units(tiles, problem, work, target)._replace(shared=shared)
