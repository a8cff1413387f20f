"""What the Hopper backward kernel is specialised to, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.codegen.kernels.common.lengths import Lengths
from fa4flex.codegen.kernels.common.order import Order

KEYS = 64
"""Keys of one consumer warpgroup: what one wgmma instruction spans."""


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 32 that hold the tensors'
    tile_m                   queries per step, a multiple of 64
    tile_n                   keys per block; each consumer warpgroup owns 64 of them
    q_stages, do_stages      tiles of Q, and of dO, in flight
    dq_stages                tiles of dQ on their way to global memory
    producer_registers, consumer_registers   per thread, after the split
    masked                   whether tiles come from block tables; otherwise all of them
    deterministic            whether sums of dQ are added up in one order
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    """

    head_dim: int
    head_dim_v: int
    tile_m: int = 64
    tile_n: int = 128
    q_stages: int = 2
    do_stages: int = 2
    dq_stages: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    masked: bool = False
    lengths: Lengths = "dense"
    deterministic: bool = False

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_n // KEYS

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def turn_rows(self) -> int:
        """One warp adds all of a tile of dQ."""
        return self.tile_m

    @property
    def split_columns(self) -> bool:
        """Whether warpgroups share the rows of dQ and take half of its columns each; otherwise each takes
        its own rows."""
        return self.tile_m < 64 * self.consumers

    @property
    def dq_shape(self) -> tuple[int, int]:
        """(rows, columns) of dQ that one warpgroup computes."""
        if self.split_columns:
            return self.tile_m, self.head_dim // self.consumers
        return self.tile_m // self.consumers, self.head_dim

    @property
    def dq_order(self) -> Order:
        """Part by part, as an accumulator's registers lie: of lane l of a warpgroup, two columns from 2 (l %
        4) on of a row and of the row 8 below, then the same 8 columns further."""
        rows, columns = self.dq_shape
        down, across = (0, columns) if self.split_columns else (rows, 0)
        return Order(
            (2, 2, 4, 8, 4, columns // 8, self.consumers),
            rows=(0, 8, 0, 1, 16, 0, down),
            columns=(1, 0, 2, 0, 0, 8, across),
        )
