"""Barriers of a block, as data. Warps are those of the kernel for few query rows."""

from __future__ import annotations

from fa4flex.kernels.decode_sm100.roles import ALLOCATED, MEET
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

HALVES = NamedRow("halves", 3, WARP * WARPGROUP, "maxima of both halves of a tile of keys are written")


def barrier_table(kv_stages: int) -> BarrierTable:
    rows = (
        *tile_ring("k", kv_stages, 1, ("load", "multiply")),
        Row("q_full", WARPGROUP, "softmax", "queries are there", ring="q"),
        Row("s_full", 1, "multiply", "scores are there, and all earlier products are done"),
        Row("p_full", WARPGROUP, "softmax", "probabilities are there and the output may be added to"),
        Row("o_full", 1, "multiply", "the output is complete"),
    )
    return BarrierTable(rows, (ALLOCATED, MEET, HALVES))
