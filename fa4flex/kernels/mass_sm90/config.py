"""Configuration of the Hopper kernel for sums per key, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.bwd_sm90.config import KEYS, swizzle
from fa4flex.kernels.plan.lengths import Lengths


@dataclass(frozen=True)
class Config:
    """head_dim                 width of the tiles in shared memory: a multiple of 32 that holds the tensors'
    depth                    instructions of 16 columns of scores: what is behind them is padding
    tile_m                   queries per step
    tile_n                   keys per block, 64 of each consumer warpgroup
    q_stages                 tiles of Q in flight
    together                 columns of a step that a thread turns into probabilities together
    producer_registers, consumer_registers   per thread, after the split
    masked                   whether tiles come from block tables or intervals; otherwise all of them
    one_body                 whether steps that need no mask are taken like those that do, by the same code
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    """

    head_dim: int
    depth: int | None = None
    tile_m: int = 128
    tile_n: int = 128
    q_stages: int = 2
    together: int = 16
    producer_registers: int = 24
    consumer_registers: int = 240
    masked: bool = False
    one_body: bool = False
    lengths: Lengths = "dense"

    persistent: ClassVar[bool] = False
    """Each tile of keys has a block."""

    @property
    def ragged(self) -> bool:
        """True if sequences may end before the tensors that hold them."""
        return self.lengths != "dense"

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_n // KEYS

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def swizzle(self) -> int:
        """Columns of a block of Q and K in shared memory."""
        return swizzle(self.head_dim, self.head_dim)
