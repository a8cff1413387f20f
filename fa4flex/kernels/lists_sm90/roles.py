"""Barriers of a block, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

ENTRIES = NamedRow("entries", 1, WARP * WARPGROUP, "producers have looked at all entries of a list")
LISTED = NamedRow(
    "listed", 2, 2 * WARP * WARPGROUP, "queries are written, and it is known which entries of a list count"
)


def barrier_table(kv_stages: int) -> BarrierTable:
    by, per = ("producer", "consumer"), Per(stages=kv_stages)
    rows = [row for name in "kv" for row in tile_ring(name, kv_stages, WARPGROUP, by, WARPGROUP)]
    rows += [
        Row("ids_full", WARPGROUP, "producer", "keys of a tile are told", per, "ids"),
        Row("ids_empty", WARPGROUP, "consumer", "they are no longer needed", per, "ids"),
    ]
    return BarrierTable(tuple(rows), (ENTRIES, LISTED))
