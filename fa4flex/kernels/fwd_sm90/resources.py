"""Resources of the roles of the Hopper forward kernel: tensors, barriers and pipelines of one block."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute, pipeline

from fa4flex.kernels.common.next_tile import NextTile


@dataclass(frozen=True)
class Shared:
    """Shared memory: q and out (64, width, warpgroup), k (tile_n, head_dim, stage), v (head_dim_v, tile_n,
    stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor


@dataclass(frozen=True)
class Pipes:
    """k and v rings, and two barriers per warpgroup: its queries have come; they are no longer needed. The
    producer hands the number of the next tile to the consumers."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q_full: cute.Pointer
    q_empty: cute.Pointer
    next: NextTile
