"""What the Hopper backward kernel is specialised to, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa4flex.codegen.kernels.common.lengths import Lengths
from fa4flex.codegen.kernels.common.order import Order

Split = Literal["keys", "columns"]

KEYS = 64
"""Keys of one consumer warpgroup: what one wgmma instruction spans."""

SWIZZLES = (64, 32, 16)
"""Columns of 16 bits that the patterns of shared memory span."""


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 32 that hold the tensors'
    tile_m                   queries per step, a multiple of 64; of 16 where dQ is transposed
    tile_n                   keys per block
    split                    what consumer warpgroups share out: "keys", 64 each, and hold their dK and dV; or
                             the "columns" of dK and dV of 64 keys, and the queries of a step for its scores
    q_stages, do_stages      tiles of Q, and of dO, in flight
    dq_stages                tiles of dQ on their way to global memory
    producer_registers, consumer_registers   per thread, after the split
    masked                   whether tiles come from block tables; otherwise all of them
    deterministic            whether sums of dQ are added up in one order
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    workers                  multiprocessors, where blocks are persistent, one on each, and take tiles of keys
                             from a counter; 0 where each tile has a block
    """

    head_dim: int
    head_dim_v: int
    tile_m: int = 64
    tile_n: int = 128
    split: Split = "keys"
    q_stages: int = 2
    do_stages: int = 2
    dq_stages: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    masked: bool = False
    lengths: Lengths = "dense"
    deterministic: bool = False
    workers: int = 0

    @property
    def persistent(self) -> bool:
        """dK and dV then leave by the memory of dQ: the next tiles of Q and dO come meanwhile."""
        return self.workers > 0

    @property
    def ragged(self) -> bool:
        """Whether sequences may end before the tensors that hold them."""
        return self.lengths != "dense"

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_n // KEYS if self.split == "keys" else 2

    @property
    def queries(self) -> int:
        """Of a step, those whose scores one warpgroup computes."""
        return self.tile_m if self.split == "keys" else self.tile_m // self.consumers

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
    def transposes_dq(self) -> bool:
        """Whether dQ' = K' dS' is what is multiplied: columns of dQ are then the 64 rows of an instruction,
        of which queries need not be a whole number. dS lies along the keys."""
        return self.tile_m % KEYS != 0

    @property
    def dq_shape(self) -> tuple[int, int]:
        """(rows, columns) of dQ that one warpgroup computes."""
        if self.split_columns:
            return self.tile_m, self.head_dim // self.consumers
        return self.tile_m // self.consumers, self.head_dim

    @property
    def dq_order(self) -> Order:
        """Part by part, as an accumulator's registers lie: of lane l of a warpgroup, two columns from 2 (l %
        4) on of a row and of the row 8 below, then the same 8 columns further. Where dQ is transposed,
        rows for columns."""
        rows, columns = self.dq_shape
        down, across = (0, columns) if self.split_columns else (rows, 0)
        if self.transposes_dq:
            return Order(
                (2, 2, 4, 8, 4, rows // 8, self.consumers),
                rows=(1, 0, 2, 0, 0, 8, down),
                columns=(0, 8, 0, 1, 16, 0, across),
            )
        return Order(
            (2, 2, 4, 8, 4, columns // 8, self.consumers),
            rows=(0, 8, 0, 1, 16, 0, down),
            columns=(1, 0, 2, 0, 0, 8, across),
        )

    @property
    def swizzles(self) -> tuple[int, int, int, int]:
        """Columns of a block of q, dout, k and v in shared memory."""
        q, dout = self.head_dim, self.head_dim_v
        if self.split == "columns":
            q, dout = q // self.consumers, dout // self.consumers
        _, k = self.dq_shape
        return (
            swizzle(self.head_dim, q),
            swizzle(self.head_dim_v, dout),
            swizzle(self.head_dim, k),
            swizzle(self.head_dim_v, self.head_dim_v),
        )


def swizzle(width: int, part: int) -> int:
    """The widest pattern of which rows this wide have a whole number, and the `part` of the columns that one
    instruction reads along them a whole number too, or lies in one."""
    return next(s for s in SWIZZLES if width % s == 0 and (part % s == 0 or s % part == 0))
