"""What the roles of a pair's backward kernel share: tensors and barriers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute, pipeline

from fa4flex.codegen.kernels.bwd_sm100 import parts as alone
from fa4flex.codegen.kernels.bwd_sm100.config import FRAGMENT
from fa4flex.codegen.kernels.bwd_sm100_pair.config import FRAGMENTS
from fa4flex.codegen.kernels.common.tensor_core import MMA_K


@dataclass(frozen=True)
class Shared(alone.Shared):
    """As of one CTA alone, but q_t, k_t and dout_t have bytes of their own, and ds_rows is (queries of which
    this CTA makes dQ, keys of the pair). sent: those bytes, for the other CTA to write."""

    sent: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """Rings of q and dout, by queries, and of their transposes, by columns of a head; and barriers. Of those
    that the multiplying warp waits for, the first CTA's count; what it signals is signalled in both CTAs.

    k_full, v_full, k_t_full   the pair's keys and values have come
    lse2_full, lse2_empty      by stage of q: rows' log-sum-exps have come; they are read
    delta_full, delta_empty    by stage of dout: likewise rows' deltas
    s_full, dp_full            scores, or dP, are there, and all earlier products are done
    p_full, ds_full            probabilities, or dS, are in tensor memory, and scores, or dP, read
    ds_come                    dS of this CTA's queries and all keys is in its shared memory
    ds_there                   that has happened in the second CTA
    dq_full, dq_empty          a step's dQ is there, and all earlier products are done; it is read
    dv_full, dk_full           all steps have been added to dV, or dK
    """

    q: pipeline.PipelineTmaUmma
    q_t: pipeline.PipelineTmaUmma
    dout: pipeline.PipelineTmaUmma
    dout_t: pipeline.PipelineTmaUmma
    k_full: cute.Pointer
    v_full: cute.Pointer
    k_t_full: cute.Pointer
    lse2_full: cute.Pointer
    lse2_empty: cute.Pointer
    delta_full: cute.Pointer
    delta_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    dp_full: cute.Pointer
    ds_full: cute.Pointer
    ds_come: cute.Pointer
    ds_there: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    dv_full: cute.Pointer
    dk_full: cute.Pointer


def operand_columns(firsts: tuple[int, int], apart: int) -> list[int]:
    """Where in tensor memory the first operand of each instruction begins: two queries in a column, and the
    fragments of a compute warpgroup so far apart."""
    steps = FRAGMENT // MMA_K
    return [
        firsts[fragment % 2] + fragment // 2 * apart + i * MMA_K // 2
        for fragment in range(FRAGMENTS)
        for i in range(steps)
    ]
