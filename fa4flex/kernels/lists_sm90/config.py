"""Configuration of the Hopper kernel for listed keys, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fa4flex.kernels.lists.config import ROWS, ListsConfig
from fa4flex.kernels.plan.lengths import Lengths


@dataclass(frozen=True)
class Config(ListsConfig):
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 16 that hold the tensors'
    tile_n                   keys per tile
    kv_stages                tiles of K, and as many of V, in flight
    blocks                   of a multiprocessor at a time
    producer_registers, consumer_registers   per thread, after the split
    rescale_threshold        in log2 units: the output is rescaled only when the row maximum grew by more
    lengths                  "dense", "used" (seqused per batch) or "packed"
    paged                    keys and values lie in pages
    beside                   queries see sinks, a window or a tail beside their lists
    share                    tiles of keys per split; None: of each list, all splits have as many
    sinks                    a learnable logit per head joins the denominator
    statistics               whether "lse" is written
    consumers                warpgroups of ROWS rows each that share the keys of a tile
    united                   rows of the lists whose queries a tile has
    """

    head_dim: int
    head_dim_v: int
    tile_n: int
    kv_stages: int
    blocks: int
    producer_registers: int
    consumer_registers: int
    rescale_threshold: float = 0.0
    lengths: Lengths = "dense"
    paged: bool = False
    beside: bool = False
    share: int | None = None
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    consumers: int = field(default=1, metadata={"default": 1})
    united: int = field(default=1, metadata={"default": 1})

    dynamic: ClassVar[bool] = False
    gather_warps: ClassVar[int] = 4  # type: ignore[misc]  # of other kernels it is a choice
    starts_ahead: ClassVar[bool] = False
    skip: ClassVar[float] = 0.0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (1 + self.consumers)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.consumers
