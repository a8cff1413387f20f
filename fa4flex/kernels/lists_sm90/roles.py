"""Barriers of a block, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

ENTRIES = NamedRow("entries", 8, WARP * WARPGROUP, "producers have looked at all entries of a list")


def listed(consumers: int) -> NamedRow:
    """The barrier at which all threads of a block with so many consumer warpgroups meet."""
    meaning = "queries are written, and it is known which entries of a list count"
    return NamedRow("listed", 9, (1 + consumers) * WARP * WARPGROUP, meaning)


def barrier_table(kv_stages: int, consumers: int = 1) -> BarrierTable:
    by, per, warps = ("producer", "consumer"), Per(stages=kv_stages), consumers * WARPGROUP
    rows = [row for name in "kv" for row in tile_ring(name, kv_stages, warps, by, WARPGROUP)]
    rows += [
        Row("ids_full", WARPGROUP, "producer", "keys of a tile are told", per, "ids"),
        Row("ids_empty", warps, "consumer", "they are no longer needed", per, "ids"),
    ]
    return BarrierTable(tuple(rows), (ENTRIES, listed(consumers)))
