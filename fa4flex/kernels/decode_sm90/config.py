"""Configuration of the Hopper kernel for few query rows, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.paging import Gathering


@dataclass(frozen=True)
class Config(Gathering):
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 16 that hold the tensors'
    tile_n                   keys per tile
    kv_stages                tiles of K, and as many of V, in flight
    blocks                   of a multiprocessor at a time
    producer_registers, consumer_registers   per thread, after the split
    rescale_threshold        in log2 units: the output is rescaled only when the row maximum grew by more
    lengths                  "dense" or "used" (seqused per batch)
    paged                    keys and values lie in pages
    box_rows                 keys that one copy may bring: all of a tile, or of pages, fewer
    gather_warps             warps that copy pages row by row; 0: one warp copies boxes
    starts_ahead             what scores start from is asked for a tile ahead: it is read from memory
    share                    tiles of keys per split; None: of each sequence, all splits have as many
    sinks                    a learnable logit per head joins the denominator
    statistics               whether "lse" is written
    slice_rows               rows of a tile, at most, that has some heads of a group; 0: tiles have all heads
    skip                     probability that each row may leave out, by tiles of keys
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
    box_rows: int = 0
    gather_warps: int = 0
    starts_ahead: bool = False
    share: int | None = None
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    skip: float = field(default=0.0, metadata={"default": 0.0})
    slice_rows: int = field(default=0, metadata={"default": 0})

    dynamic: ClassVar[bool] = False
    splits: ClassVar[bool] = True
    """True if several blocks may share the keys of a tile."""
    threads: ClassVar[int] = 256
