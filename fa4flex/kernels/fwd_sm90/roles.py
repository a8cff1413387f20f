"""Barriers of a block, as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fa4flex.kernels.fwd_sm90.config import PRODUCERS
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.paging import Producing
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

TURN = NamedRow("turn", 1, 2 * WARP * WARPGROUP, "it is a consumer's turn to issue products")
WRITTEN = NamedRow("rows", 5, WARP * WARPGROUP, "a consumer's warps have written their rows")


class Sizes(Protocol):
    """Numbers of consumer warpgroups, and of tiles of queries in flight."""

    @property
    def consumers(self) -> int: ...
    @property
    def q_stages(self) -> int: ...


def barrier_table(
    sizes: Sizes,
    kv_stages: int,
    dynamic: bool = False,
    pingpong: bool = False,
    producing: Producing = "alone",
    sharing: int = 1,
) -> BarrierTable:
    """dynamic: a producer hands over the next tile; pingpong: consumers take turns; sharing: so many
    warpgroups have the same rows."""
    n, producers = sizes.consumers, PRODUCERS[producing]
    queries, warps = Per(n, sizes.q_stages), n * sharing * WARPGROUP
    second = {"alone": "", "apart": ", producer of values", "gathering": ", producer of rows"}[producing]
    gather_warps = producers if producing == "gathering" else 0
    keys = "producer" + second * (producing == "gathering")
    values = "producer of values" if producing == "apart" else keys
    rows = (
        Row("q_full", 1, "producer", "queries have come", queries, "q"),
        Row("q_empty", sharing * WARPGROUP, "consumer", "they are no longer needed", queries, "q"),
        *tile_ring("k", kv_stages, warps, (keys, "consumer"), gather_warps),
        *tile_ring("v", kv_stages, warps, (values, "consumer"), gather_warps),
        Row("next_full", 1, "producer", "the next tile is known", ring="next", used=dynamic),
        Row(
            "next_empty",
            warps + producers - 1,
            f"consumer{second}",
            "all have read it",
            ring="next",
            used=dynamic,
        ),
    )
    turns = (replace(TURN, units=n),) if pingpong else ()
    return BarrierTable(rows, (*turns, replace(WRITTEN, units=n * sharing)), paired=True)
