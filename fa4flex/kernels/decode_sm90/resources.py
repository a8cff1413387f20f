"""Resources of the roles of the Hopper kernel for few query rows: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, head_dim, 1), k (tile_n, head_dim, stage), v (head_dim_v, tile_n, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
