"""Resources of the roles of a pair's backward kernel: tensors and barriers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute, pipeline

from fa4flex.kernels.bwd_sm100 import resources as base


@dataclass(frozen=True)
class Shared(base.Shared):
    """Shared memory of one CTA of a pair, as of one CTA alone, but q_t, k_t and dout_t have bytes of their
    own, and ds_rows is (queries of which this CTA makes dQ, keys of the pair). sent: those bytes, for the
    other CTA to write."""

    sent: cute.Pointer


@dataclass(frozen=True)
class Pipes(base.Pipes):
    """Pipelines and barriers of a pair of CTAs, as of one CTA alone; rings of q and dout are by queries, and
    there are those of their transposes, by columns of a head. Of barriers that the multiplying warp waits
    for, the first CTA's count; what it signals is signalled in both CTAs.

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
