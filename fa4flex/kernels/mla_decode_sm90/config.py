"""Configuration of the Hopper kernel for latent rows, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.plan.lengths import Lengths

ROWS = 64
"""Pairs of a query and a head of a tile: the rows of one product."""

BLOCK = 64
"""Keys of a block, whose scores one warpgroup has."""

BLOCKS = 2
"""Blocks of a tile of keys, one for each of the warpgroups that multiply."""

PIECE = 64
"""Columns of a piece of a block: what one copy brings, and one barrier tells of."""


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    columns of a row, and of its value: the first ones
    tile_n                   keys per tile: BLOCKS blocks
    producer_registers, consumer_registers   per thread, after the split
    rescale_threshold        in log2 units: the output is rescaled only when the row maximum grew by more
    lengths                  "dense" or "used" (seqused per batch)
    paged                    rows lie in pages
    box_rows                 keys that one copy brings: all of a block, or of pages, fewer
    share                    tiles of keys per split; None: of each sequence, all splits have as many
    sinks                    a learnable logit per head joins the denominator
    statistics               whether "lse" is written
    """

    head_dim: int
    head_dim_v: int
    tile_n: int
    producer_registers: int
    consumer_registers: int
    rescale_threshold: float = 0.0
    lengths: Lengths = "dense"
    paged: bool = False
    box_rows: int = BLOCK
    share: int | None = None
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)

    dynamic: ClassVar[bool] = False
    splits: ClassVar[bool] = True
    """True if several blocks may share the keys of a tile."""
    starts_ahead: ClassVar[bool] = False
    slice_rows: ClassVar[int] = ROWS
    blocks: ClassVar[int] = 1
    """Number of blocks of a multiprocessor at a time."""
    threads: ClassVar[int] = 384

    @property
    def clears(self) -> bool:
        """True if what lies past the end of a sequence is brought, too, and has to be cleared."""
        return self.lengths != "dense"

    @property
    def pieces(self) -> int:
        """Pieces of a block."""
        return self.head_dim // PIECE

    @property
    def own(self) -> int:
        """Pieces of the columns of the output that a warpgroup has."""
        return self.head_dim_v // PIECE // BLOCKS

    @property
    def spare(self) -> tuple[int, ...]:
        """Piece of a block that is no value, where its probabilities lie once its scores are there; of rows
        that are all value there is none, and probabilities have room of their own."""
        first = self.head_dim_v // PIECE
        return (first,) if self.pieces > first else ()
