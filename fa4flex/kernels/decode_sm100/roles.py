"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

MULTIPLY, LOAD = 4, 5
"""Warps that multiply and load; those before take the softmax."""

WARPS = 6

ALLOCATED = NamedRow(
    "allocated",
    1,
    WARP * (WARPGROUP + 1),
    "tensor memory is there, for the warps that take the softmax, and the one that multiplies",
)
MEET = NamedRow(
    "meeting",
    2,
    WARP * WARPGROUP,
    "the four warps of the softmax have written what the others read, or have read it",
)


def barrier_table(kv_stages: int, gather_warps: int = 0, producer: str = "load") -> BarrierTable:
    """gather_warps: of those that copy rows of pages; producer: the role that brings keys."""
    by = producer, "multiply"
    rows = (
        *(row for name in "kv" for row in tile_ring(name, kv_stages, 1, by, gather_warps)),
        Row("q_full", WARPGROUP, "softmax", "queries are in tensor memory", ring="Q"),
        Row("s_full", 1, "multiply", "scores are there, and all earlier products are done"),
        Row("p_full", WARPGROUP, "softmax", "probabilities are there and the output may be added to"),
        Row("o_full", 1, "multiply", "the output is complete"),
    )
    return BarrierTable(rows, (ALLOCATED, MEET))
