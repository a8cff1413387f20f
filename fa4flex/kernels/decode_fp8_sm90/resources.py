"""Resources of the roles of the Hopper kernel for few query rows over an e4m3 cache."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute


@dataclass(frozen=True)
class Shared:
    """Shared memory: k (tile_n, head_dim, stage) and v (tile_n, head_dim_v, stage), bytes in swizzled blocks
    of columns, and where they and queries begin. Once all keys are read, `sums` [warp, row, head_dim_v] and
    `states` [warp, row, 4], float32, lie in v and k: outputs that are not divided yet; shift, total, and what
    to multiply the output by, of one row."""

    k: cute.Tensor
    v: cute.Tensor
    q_address: Int32
    k_address: Int32
    v_address: Int32
    sums: cute.Tensor
    states: cute.Tensor
