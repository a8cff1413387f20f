"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from fa4flex.kernels.decode_sm100 import roles as base
from fa4flex.kernels.decode_sm100.roles import ALLOCATED, MEET
from fa4flex.kernels.lists.roles import ENTRIES, KNOWN, listed
from fa4flex.kernels.plan.barriers import BarrierTable, Per, Row
from fa4flex.kernels.plan.topology import WARPGROUP

GATHER, MULTIPLY = WARPGROUP, 2 * WARPGROUP
"""First of the warps that gather, and the one that multiplies; those before take the softmax."""

WARPS = MULTIPLY + 1

LISTED = listed(WARPS, KNOWN)


def barrier_table(kv_stages: int) -> BarrierTable:
    """Barriers of the kernel for few query rows, and what is told of keys."""
    per = Per(stages=kv_stages)
    rows = (
        *base.barrier_table(kv_stages, WARPGROUP, "producer").rows,
        Row("ids_full", WARPGROUP, "producer", "keys of a tile are told", per, "ids"),
        Row("ids_empty", WARPGROUP, "softmax", "they are no longer needed", per, "ids"),
    )
    return BarrierTable(rows, (ALLOCATED, MEET, ENTRIES, LISTED))
