"""Barriers of a block, as data."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.lists_sm90 import roles as lists
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

SHARED = NamedRow("shared", 3, WARP * WARPGROUP, "P and dS of all rows are in shared memory")
FREE = NamedRow("free", 4, WARP * WARPGROUP, "products have read those of the tile before")


def barrier_table(k_stages: int, v_stages: int) -> BarrierTable:
    """Barriers of the forward kernel, with stages of V of their own."""
    table = lists.barrier_table(k_stages)
    of_values = tuple(
        replace(row, per=Per(stages=v_stages)) if row.ring == "v" else row for row in table.rows
    )
    return replace(table, rows=of_values, named=(*table.named, SHARED, FREE))
