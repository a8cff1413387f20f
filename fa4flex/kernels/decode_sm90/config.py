"""What the Hopper kernel for few query rows is specialised to, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.codegen.plan.lengths import Lengths


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 16 that hold the tensors'
    tile_n                   keys per tile
    kv_stages                tiles of K, and as many of V, in flight
    blocks                   of a multiprocessor at a time
    producer_registers, consumer_registers   per thread, after the split
    rescale_threshold        in log2 units: the output is rescaled only when the row maximum grew by more
    lengths                  "dense" or "used" (seqused per batch)
    box_rows                 keys of a tile that lie next to each other: all of them, or where pages are smaller
                             than a tile, so many at least
    paged                    keys and values lie in pages
    sinks                    a learnable logit per head joins the denominator
    statistics               whether "lse" is written
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
    box_rows: int = 0
    paged: bool = False
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)

    dynamic: ClassVar[bool] = False
    splits: ClassVar[bool] = True
    """Whether several blocks may share the keys of a tile."""
    threads: ClassVar[int] = 256
