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
class Pipes(alone.Pipes):
    """As of one CTA alone; rings of q and dout are by queries, and there are those of their transposes, by
    columns of a head. Of barriers that the multiplying warp waits for, the first CTA's count; what it signals
    is signalled in both CTAs.

    k_t_full   likewise the pair's keys have come, by columns
    ds_full    dS are in tensor memory, and dP read
    ds_come    dS of this CTA's queries and all keys is in its shared memory
    ds_there   that has happened in the second CTA
    """

    q_t: pipeline.PipelineTmaUmma
    dout_t: pipeline.PipelineTmaUmma
    k_t_full: cute.Pointer
    ds_come: cute.Pointer
    ds_there: cute.Pointer


def operand_columns(firsts: tuple[int, int], apart: int) -> list[int]:
    """Where in tensor memory the first operand of each instruction begins: two queries in a column, and the
    fragments of a compute warpgroup so far apart."""
    steps = FRAGMENT // MMA_K
    return [
        firsts[fragment % 2] + fragment // 2 * apart + i * MMA_K // 2
        for fragment in range(FRAGMENTS)
        for i in range(steps)
    ]
