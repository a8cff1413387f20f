"""Configuration of the Blackwell kernel for latent rows, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.decode_sm100.config import LANES
from fa4flex.kernels.decode_sm100.roles import WARPS
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.paging import Gathering

ROWS = 64
"""Pairs of a query and a head of a tile: the rows of one product."""

BLOCK = 64
"""Keys of a tile."""

PIECE = 64
"""Columns of a piece of a tile of keys: what one copy brings."""

HALVES = LANES // ROWS
"""Parts of a row in tensor memory, below each other: a product of 64 rows has the first half of its columns
in lanes 0 to 63, the second half in lanes 64 to 127 (PTX ISA, tcgen05.mma.ws, layout E)."""

WIDEST_PRODUCT = 256
"""Columns of the output that one instruction adds to, at most."""


@dataclass(frozen=True)
class TensorMemory:
    """First columns of the output, of scores and of queries, and how many are allocated."""

    output: int
    scores: int
    queries: int
    allocated: int


@dataclass(frozen=True)
class Config(Gathering):
    """head_dim, head_dim_v    columns of a row, and of its value: the first ones
    memory                   columns of tensor memory
    held                     columns of queries that tensor memory has room for; shared memory has the others
    kv_stages                tiles of keys in flight
    rescale_threshold        in log2 units: the output is rescaled only when a row maximum grew by more
    lengths                  "dense" or "used" (seqused per batch)
    paged                    rows lie in pages
    box_rows                 keys that one copy brings: all of a tile, or of pages, fewer
    gather_warps             0: one warp copies boxes
    share                    tiles of keys per split; None: of each sequence, all splits have as many
    sinks                    a learnable logit per head joins the denominator
    statistics               whether "lse" is written
    """

    head_dim: int
    head_dim_v: int
    memory: TensorMemory
    held: int
    kv_stages: int
    rescale_threshold: float = 8.0
    lengths: Lengths = "dense"
    paged: bool = False
    box_rows: int = BLOCK
    gather_warps: int = 0
    share: int | None = None
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)

    tile_n: ClassVar[int] = BLOCK
    dynamic: ClassVar[bool] = False
    splits: ClassVar[bool] = True
    """True if several blocks may share the keys of a tile."""
    slice_rows: ClassVar[int] = ROWS
    rows: ClassVar[int] = ROWS
    blocks: ClassVar[int] = 1
    """Number of blocks of a multiprocessor at a time."""
    copies: ClassVar[int] = HALVES
    """Threads of a row, each of which has its part of the keys and of the columns of the output."""
    threads: ClassVar[int] = 32 * WARPS

    @property
    def part(self) -> int:
        """Keys of a tile whose scores one thread has."""
        return self.tile_n // self.copies

    @property
    def output_columns(self) -> int:
        """Columns of the output that one thread has."""
        return self.head_dim_v // self.copies

    @property
    def product_columns(self) -> int:
        """Columns of the output that one instruction adds to."""
        return product_columns(self.head_dim_v)

    @property
    def products(self) -> int:
        """Number of products that make up the output."""
        return self.head_dim_v // self.product_columns


def product_columns(head_dim_v: int) -> int:
    """The most columns that divide the output: 256, or 128."""
    return WIDEST_PRODUCT if head_dim_v % WIDEST_PRODUCT == 0 else WIDEST_PRODUCT // 2
