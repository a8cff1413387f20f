"""Configuration of the Hopper kernel for mixed batches, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fa4flex.kernels.fwd_sm90 import config as forward

GROUPS = 2
"""Consumer warpgroups: both have the rows of a tile of few, and each has half of the keys of every tile."""

Order = Literal["tiles", "groups", "tail"]

ORDER: Order = "tiles"
"""Order of tiles, where some have few rows; else it is "tiles". "tiles": of a chunk, all heads of the
longest tile of queries, then of the next; tiles of few rows evenly among them: the fastest on an H200
(docs/notes/decoding.md). "groups": of a chunk, most tiles of the heads that share a head of keys, then of the
next ones, so that keys stay in L2 while others stream by; its shortest tiles last, of all heads. "tail": the
same, and the last tiles of a launch have many rows and few keys, in which those of few rows end."""

SHORTEST = 4
"""One of so many tiles of queries of a chunk, with the fewest keys, is among its last ones."""

TAIL = 8
"""One of so many tiles of many rows comes after all tiles of few, at most, and one for each block."""

WAVES = 4
"""Parts of all work for each multiprocessor: of a sequence with few rows, blocks share keys in parts of so
much, for balance. Unmeasured."""

LEAST = 4
"""Tiles of keys of a part, at least: beginning, ending and merging one takes about as long as loading two."""

KEPT = 6
"""Numbers that a thread hands over of its two rows: maximum, shift and total of each."""


@dataclass(frozen=True)
class Config(forward.Config):
    """The forward kernel's: it is what tiles of many rows take. few_rows: rows of a tile of few, at most;
    order: of tiles."""

    few_rows: int = 64

    order: Order = "tiles"

    share: int | None = None
    """Tiles of keys of a part, where that is asked for; None: as the work of a call is."""

    splits: ClassVar[bool] = True

    @property
    def half(self) -> int:
        """Keys of a tile that a warpgroup multiplies with few rows."""
        return self.tile_n // GROUPS
