"""Configuration of the Hopper forward kernel for wide heads, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.fwd_sm90 import config as forward

ROWS = 64
"""Rows of a tile of queries, which both warpgroups have."""

HALVES = 2
"""Warpgroups that multiply: each has scores of its part of a tile's keys, and its part of the columns of the
output."""

BUFFERS = 2
"""Tiles of probabilities in shared memory: one is written while products read the one before."""

MOST_COLUMNS = 256
"""Columns that one instruction makes."""


def instruction_columns(columns: int) -> int:
    """Columns of one instruction, of those that a warpgroup has: a whole number of blocks of 32 columns."""
    parts = -(-columns // MOST_COLUMNS)
    return columns // next(n for n in range(parts, columns) if columns % (32 * n) == 0)


@dataclass(frozen=True)
class Config(forward.Config):
    """Beside those of the forward kernel:

    splits                   several blocks may share the keys of a tile
    share                    tiles of keys per split; None: of each sequence, all splits have as many
    """

    splits: bool = False  # type: ignore[misc]
    share: int | None = None

    threads: ClassVar[int] = 128 * (1 + HALVES)
    passes: ClassVar[bool] = False
    """A tile has rows, and both warpgroups have all of them."""
    frees_queries: ClassVar[bool] = True
    """Output goes from registers to global memory."""

    @property
    def keys(self) -> int:
        """Keys of a tile whose scores a warpgroup has."""
        return self.tile_n // HALVES

    @property
    def columns(self) -> int:
        """Columns of the output that a warpgroup has."""
        return self.head_dim_v // HALVES
