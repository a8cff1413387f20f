"""Barriers of a pair's CTA, as data. Warps are those of one CTA base."""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100.config import ROWS as QUERIES
from fa4flex.kernels.bwd_sm100.roles import COMPUTING, Loads, Sizes, with_rings
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS, KEPT
from fa4flex.kernels.plan.barriers import BarrierTable, Row
from fa4flex.kernels.plan.topology import WARPGROUP

SENT_BYTES = 2 * KEPT * QUERIES
"""Bytes of dS that a CTA sends to the other one per step, of which each warp that computes sends a
fragment."""

LOADS = Loads(("k", "v"), (("q", "lse2", "dout", "delta", "dout_t", "q_t"),), ("k_t",))
"""The first dQ is the last to be multiplied of a first step, and what it takes of K comes behind that step's
tiles. Of these, q_t is free later than all others: the products that come first have been asked for then."""


def barrier_table(sizes: Sizes) -> BarrierTable:
    """Barriers of either CTA. The multiplying warp waits for those of the first one, and signals both."""
    both, sent = CTAS * COMPUTING, SENT_BYTES // COMPUTING
    rows = (
        Row("k_full", 1, "load", "the CTA's keys have come", ring="k", first=True),
        Row("v_full", 1, "load", "the CTA's values have come", ring="v", first=True),
        Row("k_t_full", 1, "load", "the pair's keys have come, by columns", ring="k_t", first=True),
        Row("s_full", 1, "multiply", "scores are there, and all earlier products are done"),
        Row("p_full", both, "compute", "probabilities are there, and scores read", first=True),
        Row("dp_full", 1, "multiply", "dP is there, and all earlier products are done"),
        Row("ds_full", both, "compute", "dS is in tensor memory, and dP read", first=True),
        Row("ds_come", both, "compute", "dS of both CTAs is in shared memory", sent=sent, senders=COMPUTING),
        Row("ds_there", 1, "tell", "so it is in the second CTA", first=True),
        Row("dq_full", 1, "multiply", "dQ is there, and all earlier products are done"),
        Row("dq_empty", CTAS * WARPGROUP, "reduce", "dQ is read", first=True),
        Row("dv_full", 1, "multiply", "dV is complete"),
        Row("dk_full", 1, "multiply", "dK is complete"),
    )
    return with_rings(rows, sizes, ("q", "q_t", "dout", "dout_t"), first=True)
