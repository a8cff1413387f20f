"""Splitting: how many blocks share the keys of a tile of queries, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MOST_SPLITS = 256
"""Partial outputs of a row: the kernel that merges them reads all of them."""

WAVES = (1 / 4, 1 / 2, *range(1, 9))
"""Numbers of splits are tried that fill the chip so many times."""

UNEVEN_WAVES, UNEVEN_SPLITS = 32, 32
"""So many blocks per multiprocessor where sequences differ in length, and at most so many splits for that."""

LEAST_PART = 32
"""Tiles of a split that is made for balance alone: the beginning and end of a block take as long as a few."""

MOST_PARTIAL = 1 / 30
"""Share of the bytes of keys and values that partial outputs may take which are made for balance alone."""

MERGING = 2.0
"""Cost of a second launch and partial outputs, in key tiles that a multiprocessor loads meanwhile."""


@dataclass(frozen=True)
class Splitting:
    """tile_n           keys of a tile
    width            columns of the output
    multiprocessors  of the chip
    uneven           sequences may be shorter than their tensor
    share            tiles of keys per split, where that is asked for
    """

    tile_n: int
    width: int
    multiprocessors: int
    uneven: bool = False
    share: int | None = None

    def splits(self, pairs: int, kv_len: int, rows: int) -> int:
        """Splits of the keys of each of `pairs` (sequence, head of keys) of up to kv_len keys. rows: of all
        pairs."""
        tiles = -(-kv_len // self.tile_n)
        if self.share is not None:
            # Two at least: a single one is not merged, and may differ from a merged one in a last bit.
            return max(-(-tiles // self.share), 2)
        # Of a row and split, a float32 is written and read for each column that a tile has in 16 bits twice.
        partial = 2 / self.tile_n * max(-(-rows // max(pairs, 1)), 1)
        return _splits(pairs, tiles, self.multiprocessors, self.uneven, partial)

    def applies(self, batch: int, rows: int, pairs: int) -> bool:
        """True if keys of such a call may be split: `rows` of `pairs` (sequence, head of keys), of `batch`
        sequences."""
        return True

    def floats(self, splits: int, rows: int, pairs: int) -> int:
        """float32 of memory for the partial outputs and log-sum-exps of `rows` rows, of `pairs` (sequence,
        head of keys); none for one split."""
        return splits * rows * (self.width + 1) if splits > 1 else 0


@lru_cache(maxsize=4096)
def _splits(pairs: int, tiles: int, multiprocessors: int, uneven: bool, partial: float) -> int:
    """The candidate of the least estimate: the blocks of the busiest multiprocessor times the tiles of a
    block, whose loads take the time, and what merging takes. Where sequences differ in length, more blocks
    than that, for balance. partial: bytes of the partial outputs of a split, in tiles of keys."""
    pairs = max(pairs, 1)
    most = max(min(tiles, MOST_SPLITS), 1)
    candidates = {min(max(int(wave * multiprocessors / pairs), 1), most) for wave in WAVES} | {1}

    def cost(splits: int) -> float:
        busiest = -(-pairs * splits // multiprocessors)
        merging = MERGING + splits * (1 / 32 + partial * pairs / multiprocessors) if splits > 1 else 0.0
        return busiest * -(-tiles // splits) + merging

    best = min(candidates, key=cost)
    if not uneven:
        return best
    balanced = min(UNEVEN_WAVES * multiprocessors // pairs, UNEVEN_SPLITS, tiles // LEAST_PART)
    return min(max(best, min(balanced, int(tiles * MOST_PARTIAL / partial))), most)
