"""Barriers of a block of either kernel, as data. Warps are those of narrower heads."""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100.roles import ALLOCATED, COMPUTING, FINISHED, Loads, Sizes, with_rings
from fa4flex.kernels.plan.barriers import BarrierTable, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARPGROUP

LOADS = Loads(("k",), (("q", "lse2"), ("dout", "delta")))

VALUE_LOADS = Loads((), (("q", "lse2"), ("dout",)))

ROWS = (
    Row("k_full", 1, "load", "the block's keys have come", ring="k"),
    Row("v_full", COMPUTING, "compute", "the block's values are in tensor memory"),
    Row("s_full", 1, "multiply", "scores are there, and all earlier products are done"),
    Row("s_read", COMPUTING, "compute", "scores are in registers"),
    Row("dp_full", 1, "multiply", "dP is there, and all earlier products are done"),
    Row("ds_full", COMPUTING, "compute", "dS is there, in both memories, and dP read"),
    Row("dq_half", 1, "multiply", "the first half of dQ is there"),
    Row("dq_full", 1, "multiply", "dQ is there, and all earlier products are done"),
    Row("dq_early", WARPGROUP, "reduce", "the first half of dQ is read, whose place the next dP takes"),
    Row("dq_empty", WARPGROUP, "reduce", "dQ is read, whose second half the scores after the next take"),
    Row("dk_full", 1, "multiply", "dK is complete"),
)


def barrier_table(sizes: Sizes) -> BarrierTable:
    """Barriers of the kernel for dK and dQ."""
    return with_rings(ROWS, sizes)


def value_barriers(sizes: Sizes) -> BarrierTable:
    """Barriers of the kernel for dV."""
    per = Per(stages=sizes.q_stages)
    rows = (
        Row("k_full", COMPUTING, "compute", "the block's keys are in tensor memory"),
        Row("s_full", 1, "multiply", "scores are there, and all earlier products are done", per),
        Row("p_full", COMPUTING, "compute", "probabilities are there, and scores read", per),
        Row("dv_full", 1, "multiply", "dV is complete"),
        *tile_ring("q", sizes.q_stages, 1, ("load", "multiply")),
        *tile_ring("dout", sizes.do_stages, 1, ("load", "multiply")),
        Row("lse2_full", 1, "load", "numbers of rows have come", per, "lse2"),
        Row("lse2_empty", COMPUTING, "compute", "they are read", per, "lse2"),
    )
    return BarrierTable(rows, (ALLOCATED, FINISHED))
