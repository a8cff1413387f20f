"""Barriers of a block, as data: those of the forward kernel, and those at which its two warpgroups meet."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.fwd_sm90 import roles as forward
from fa4flex.kernels.fwd_wide_sm90.config import HALVES
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

_ALL = HALVES * WARP * WARPGROUP

MAXIMA = NamedRow("maxima", 1, _ALL, "maxima of both parts of a tile of keys are written")
PROBABILITIES = NamedRow("probabilities", 2, _ALL, "probabilities of both parts are written")
SUMS = NamedRow("sums", 3, _ALL, "sums of both parts of all keys are written")


def barrier_table(sizes: forward.Sizes, kv_stages: int, dynamic: bool = False) -> BarrierTable:
    """dynamic: the producer hands over the next tile."""
    table = forward.barrier_table(sizes, kv_stages, dynamic, sharing=HALVES)
    return replace(table, named=(*table.named, MAXIMA, PROBABILITIES, SUMS))
