"""Configuration of the Hopper kernel for mixed batches, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fa4flex.kernels.fwd_sm90 import config as forward

GROUPS = 2
"""Consumer warpgroups: both have the rows of a tile of few, and each has half of the keys of every tile."""

Order = Literal["kinds", "tiles"]

ORDER: Order = "kinds"
"""Order of tiles, where some have few rows. "kinds": a block has one kind of tile as long as there is one,
and so many begin with few rows that both kinds should run out together. "tiles": all blocks take tiles of
both kinds, which are spread evenly (docs/notes/decoding.md has what both take)."""


@dataclass(frozen=True)
class Cost:
    """Nanoseconds that a block takes for a tile, and more for each tile of its keys."""

    tile: int
    step: int


FEW_COST, MANY_COST = Cost(tile=2000, step=650), Cost(tile=1500, step=2150)
"""Costs of tiles of few rows and of many at heads of 128; other widths have about the same ratio. Few: 64 KB
at 100 GB/s, which is what a block reads if about half of all do; and its beginning and end. Many: of chunks
alone on an H200, 154 us for 1,024 tiles with 8.5 steps on average."""

HANDED, NOTED = 10, 10
"""Numbers of 32 bits that a tile is handed over in, and that the warp that takes tiles
notes behind these, as it has few registers."""

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
    """The forward kernel's: it is what tiles of many rows take. few_rows: rows of a tile of few, at most;
    order: of tiles."""

    few_rows: int = 64

    order: Order = "kinds"

    share: int | None = None
    """Tiles of keys of a part, where that is asked for; None: as the work of a call is."""

    splits: ClassVar[bool] = True

    @property
    def half(self) -> int:
        """Keys of a tile that a warpgroup multiplies with few rows."""
        return self.tile_n // GROUPS
