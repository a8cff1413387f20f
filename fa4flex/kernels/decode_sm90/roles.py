"""Barriers of a block, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

WRITTEN = NamedRow("rows", 1, WARP * WARPGROUP, "queries are written, or values past an end cleared")


def barrier_table(
    kv_stages: int, gather_warps: int = 0, meeting: NamedRow = WRITTEN, asks: bool = False
) -> BarrierTable:
    """gather_warps: of those that copy rows of pages; meeting: of the consumer's warps; asks: values come
    when they are asked for."""
    by = "producer", "consumer"
    rows = [row for name in "kv" for row in tile_ring(name, kv_stages, WARPGROUP, by, gather_warps)]
    if asks:
        told, per = "it is known whether values are wanted", Per(stages=kv_stages)
        rows.append(Row("asked_full", WARPGROUP, "consumer", told, per, "asked"))
    return BarrierTable(tuple(rows), (meeting,))
