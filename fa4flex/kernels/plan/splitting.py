"""Splitting: how many blocks share the keys of a tile of queries, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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

MOST_COMPARED = 512
"""Sequences whose lengths each warp of a kernel reads, at most, to see whether they are about the same."""

MERGING = 2.0
"""Cost of a second launch and partial outputs, in key tiles that a multiprocessor loads meanwhile."""


class Splits(NamedTuple):
    """Splits of the keys of each sequence: `most`, and `even` where sequences have about the same length: no
    more than that. floats: float32 of memory for the partial outputs and log-sum-exps."""

    most: int
    even: int
    floats: int


@dataclass(frozen=True)
class Splitting:
    """tile_n           keys of a tile
    width            columns of the output
    multiprocessors  of the chip
    blocks           of a multiprocessor at a time
    uneven           sequences may be shorter than their tensor
    share            tiles of keys per split, where that is asked for
    seen             keys that a row sees, at most; None: all
    beside           numbers that a split leaves of a row besides columns
    tile_rows        rows of a tile, of which those of a pair are several; 0: they are one
    """

    tile_n: int
    width: int
    multiprocessors: int
    blocks: int = 2
    uneven: bool = False
    share: int | None = None
    seen: int | None = None
    beside: int = 1
    tile_rows: int = 0

    def splits(self, batch: int, pairs: int, kv_len: int, rows: int) -> Splits:
        """Splits of the keys of each of `pairs` (sequence, KV head) of up to kv_len keys, of `batch`
        sequences. rows: of all pairs."""
        if self.tile_rows:
            pairs *= max(-(-rows // max(pairs, 1) // self.tile_rows), 1)
        tiles = -(-kv_len // self.tile_n)
        if self.share is not None:
            # Two at least: a single one is not merged, and may differ from a merged one in a last bit.
            most = even = max(-(-tiles // self.share), 2)
        else:
            each = max(-(-rows // max(pairs, 1)), 1)
            if self.seen is not None:
                # All rows of a pair together, which begin and end within tiles.
                tiles = min(tiles, (self.seen + each) // self.tile_n + 2)
            # Of a row and split, a float32 is written and read for each column that a tile has in 16 bits
            # twice.
            partial = 2 / self.tile_n * each
            most, even = _splits(pairs, tiles, self.multiprocessors, self.uneven and batch > 1, partial)
            even = self._even(pairs, most, even) if batch <= MOST_COMPARED else most
        return Splits(most, even, most * rows * (self.width + self.beside) if most > 1 else 0)

    def _even(self, pairs: int, most: int, even: int) -> int:
        """Splits of even batches, of which `even` are best, where there are blocks for `most`.

        Blocks that even batches do not need end at once. But where a launch has more blocks than the chip has
        room for, some multiprocessors get two of the first ones and others none. So the first ones are then
        as many as there is room for.
        """
        room = self.blocks * self.multiprocessors
        return even if pairs * most <= room else max(even, min(room // pairs, most))


@lru_cache(maxsize=4096)
def _splits(pairs: int, tiles: int, multiprocessors: int, uneven: bool, partial: float) -> tuple[int, int]:
    """(most, even) splits. Of an even batch, the candidate of the least estimate: the blocks of the busiest
    multiprocessor times the tiles of a block, whose loads take the time, and what merging takes. Where
    sequences differ in length, more blocks than that, for balance. partial: bytes of the partial outputs of a
    split, in tiles of keys."""
    pairs = max(pairs, 1)
    most = max(min(tiles, MOST_SPLITS), 1)
    candidates = {min(max(int(wave * multiprocessors / pairs), 1), most) for wave in WAVES} | {1}

    def cost(splits: int) -> float:
        busiest = -(-pairs * splits // multiprocessors)
        merging = MERGING + splits * (1 / 32 + partial * pairs / multiprocessors) if splits > 1 else 0.0
        return busiest * -(-tiles // splits) + merging

    best = min(candidates, key=cost)
    if not uneven:
        return best, best
    balanced = min(UNEVEN_WAVES * multiprocessors // pairs, UNEVEN_SPLITS, tiles // LEAST_PART)
    return min(max(best, min(balanced, int(tiles * MOST_PARTIAL / partial))), most), best
