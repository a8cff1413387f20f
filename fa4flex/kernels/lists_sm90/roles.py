"""Barriers of a block, as data."""

from __future__ import annotations

from fa4flex.kernels.lists.roles import ENTRIES, listed
from fa4flex.kernels.plan.barriers import BarrierTable, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARPGROUP


def barrier_table(kv_stages: int, consumers: int = 1) -> BarrierTable:
    by, per, warps = ("producer", "consumer"), Per(stages=kv_stages), consumers * WARPGROUP
    rows = [row for name in "kv" for row in tile_ring(name, kv_stages, warps, by, WARPGROUP)]
    rows += [
        Row("ids_full", WARPGROUP, "producer", "keys of a tile are told", per, "ids"),
        Row("ids_empty", warps, "consumer", "they are no longer needed", per, "ids"),
    ]
    return BarrierTable(tuple(rows), (ENTRIES, listed(warps + WARPGROUP)))
