"""Configuration of the Hopper kernel for mixed batches, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.fwd_sm90 import config as forward
from fa4flex.kernels.plan.arguments import COUNTERS, TAKEN

GROUPS = 2
"""Consumer warpgroups: both have the rows of a tile of few, and each has half of the keys of every tile."""

HANDED, NOTED = 11, 13
"""Numbers of 32 bits that a tile is handed over in, and that the warp that takes tiles notes behind these, as
it has few registers. Together they are read four at a time."""

MOST_SPLIT = (COUNTERS - TAKEN) // 4
"""Tiles of few rows with several parts, at most: each 16 of their rows have a counter of parts that are
done, behind those of tiles."""

WAVES = 4
"""Parts of all work for each multiprocessor: of a sequence with few rows, blocks share keys in parts of so
much, for balance. Unmeasured."""

LEAST = 4
"""Tiles of keys of a part, at least: beginning, ending and merging one takes about as long as loading two."""

ROWS = 64
"""Rows of a tile of few, in memory: of a warpgroup's product."""

KEPT = 3
"""Numbers of a row that one consumer hands to the other: maximum, shift and total."""

MOST_STAGES = 6
"""Stages of keys and of values, at most: a tile of few rows waits for memory, and more is under way."""


@dataclass(frozen=True)
class Config(forward.Config):
    """The forward kernel's: it is what tiles of many rows take. few_rows: rows of a tile of few, at most."""

    few_rows: int = 64

    share: int | None = None
    """Tiles of keys of a part, where that is asked for; None: as the work of a call is."""

    splits: ClassVar[bool] = True

    @property
    def half(self) -> int:
        """Keys of a tile that a warpgroup multiplies with few rows."""
        return self.tile_n // GROUPS
