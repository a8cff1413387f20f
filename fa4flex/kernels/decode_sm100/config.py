"""Configuration of the Blackwell kernel for few query rows, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fa4flex.kernels.decode_sm100.roles import WARPS
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.paging import Gathering

LANES = 128
"""Lanes of tensor memory, and rows of one tcgen05.mma. A tile of query rows is there several times."""

HELD = 16
"""Columns of 32 bits that a thread moves between registers and tensor memory at a time."""

MERGED = 32
"""Columns of the output whose copies are merged at a time."""

MERGED_STRIDE = MERGED + 4
"""Floats from one row of merged columns to the next: lanes that access shared memory together meet in no
bank."""

MERGED_STAGES = 2
"""Buffers of merged columns: while one is read, the other is written."""


@dataclass(frozen=True)
class TensorMemory:
    """First columns of queries, of the output, and of scores, over which probabilities lie; and how many are
    allocated."""

    queries: int
    output: int
    scores: int
    allocated: int


@dataclass(frozen=True)
class Config(Gathering):
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 16 that hold the tensors'
    memory                   columns of tensor memory
    tile_n                   keys per tile
    copies                   of the query rows in tensor memory: each meets its own part of a tile's keys
    kv_stages                tiles of K, and as many of V, in flight
    blocks                   of a multiprocessor at a time
    rescale_threshold        in log2 units: the output is rescaled only when a row maximum grew by more
    lengths                  "dense" or "used" (seqused per batch)
    paged                    keys and values lie in pages
    box_rows                 keys that one copy may bring: all of a tile, or of pages, fewer
    gather_warps             warps that copy pages row by row; 0: one warp copies boxes
    share                    tiles of keys per split; None: of each sequence, all splits have as many
    sinks                    a learnable logit per head joins the denominator
    statistics               whether "lse" is written
    slice_rows               rows of a tile, at most, that has some heads of a group; 0: tiles have all heads
    """

    head_dim: int
    head_dim_v: int
    memory: TensorMemory
    tile_n: int
    copies: int
    kv_stages: int
    blocks: int
    rescale_threshold: float = 8.0
    lengths: Lengths = "dense"
    paged: bool = False
    box_rows: int = 0
    gather_warps: int = 0
    share: int | None = None
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    slice_rows: int = field(default=0, metadata={"default": 0})

    dynamic: ClassVar[bool] = False
    splits: ClassVar[bool] = True
    """True if several blocks may share the keys of a tile."""
    threads: ClassVar[int] = 32 * WARPS

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return LANES // self.copies

    @property
    def merges_over(self) -> str:
        """The wider ring, in whose memory copies are merged when the last tile is multiplied."""
        return wider(self.head_dim, self.head_dim_v)

    @property
    def part(self) -> int:
        """Keys of a tile that one copy of the rows meets."""
        return self.tile_n // self.copies

    @property
    def output_columns(self) -> int:
        """Columns of the output that one thread has."""
        return self.head_dim_v


def kept(statistics: tuple[str, ...]) -> int:
    """Numbers of a row that a copy of it shares with the others."""
    return 3 if "entropy" in statistics else 2


def wider(head_dim: int, head_dim_v: int) -> str:
    return "k" if head_dim >= head_dim_v else "v"
