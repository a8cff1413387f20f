"""Barriers of a block, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

WRITTEN = NamedRow("rows", 1, WARP * WARPGROUP, "queries are written, or values past an end cleared")


def barrier_table(kv_stages: int, gather_warps: int = 0, meeting: NamedRow = WRITTEN) -> BarrierTable:
    """gather_warps: of those that copy rows of pages; meeting: of the consumer's warps."""
    by = "producer", "consumer"
    rows = (row for name in "kv" for row in tile_ring(name, kv_stages, WARPGROUP, by, gather_warps))
    return BarrierTable(tuple(rows), (meeting,))
