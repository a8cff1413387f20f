"""Barriers of a block with wide heads, as data. Warps are those of narrower ones."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.bwd_sm100.roles import COMPUTING, ROWS, Loads, Sizes, with_rings
from fa4flex.kernels.plan.barriers import BarrierTable, Row
from fa4flex.kernels.plan.topology import WARPGROUP

LOADS = Loads(("k",), (("dout", "delta"), ("q", "lse2")), ("v",))
"""Shared memory holds one tile of each. That of dO is free first, and what comes while dK and dQ are
multiplied does not hold up the next scores, which read twice as much. So dO comes before Q, and values, which
the second product takes, after the first tile of both."""


def barrier_table(sizes: Sizes) -> BarrierTable:
    narrow = (
        replace(row, meaning="probabilities are there") if row.name == "p_full" else row for row in ROWS
    )
    rows = (
        *narrow,
        Row("s_read", COMPUTING, "compute", "scores are in registers"),
        Row("dq_begun", WARPGROUP, "reduce", "the columns of dQ that the next scores take are read"),
    )
    return with_rings(rows, sizes)
