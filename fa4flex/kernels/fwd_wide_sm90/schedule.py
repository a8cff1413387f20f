"""The tiles of queries that a block takes, and its part of their keys where blocks share these."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.even_batches import splits_of
from fa4flex.kernels.common.hooks import At
from fa4flex.kernels.common.keys import KeyTiles
from fa4flex.kernels.common.packed_rows import run_of
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid


class SplitWork(NamedTuple):
    """A Work, of which a block has the keys of one of `splits` parts. split: its number, or -1 where it is
    the only one."""

    tile: Int32
    h: Int32
    b: Int32
    q_offset: Int32
    kv_offset: Int32
    q_len: Int32
    kv_len: Int32
    valid: Boolean
    split: Int32
    splits: Int32

    @property
    def alone(self) -> Boolean:
        """True if the block has all keys."""
        return self.split < 0


class Later(NamedTuple):
    """Tiles from number `first` on."""

    tiles: Any
    first: Int32

    def at(self, i: Int32) -> Int32:
        tile: Int32 = self.tiles.at(self.first + i)
        return tile


class Run(NamedTuple):
    """Some of the KeyTiles of a tile of queries, in the same order. some: False where there are none; then
    they are one of which nothing counts."""

    masked: Later
    full: Later
    masked_count: Int32
    full_count: Int32
    some: Boolean

    @property
    def count(self) -> Int32:
        return self.masked_count + self.full_count


def run(whole: KeyTiles, first: Int32, last: Int32) -> Run:
    """Tiles number `first` to `last` of all."""
    some = first < last
    masked = cutlass.max(cutlass.min(whole.masked_count, last) - first, Int32(0))
    return Run(
        Later(whole.masked, first),
        Later(whole.full, whole.count - last),  # the last of them come first
        Int32(select_(some, masked, Int32(1))),
        Int32(select_(some, last - first - masked, Int32(0))),
        some,
    )


class Scheduler(TileScheduler):
    """`config` says whether blocks share the keys of a tile, too."""

    def work(self, number: Int32, grid: Grid, arguments: Arguments) -> Any:
        """The tile of a number; of splits, the first ones of all tiles come before any second one."""
        if not self.config.splits:
            return TileScheduler.work(self, number, grid, arguments)
        splits = cute.arch.make_warp_uniform(splits_of(arguments))
        split = number // grid.total
        work = TileScheduler.work(self, number - split * grid.total, grid, arguments)
        own = Int32(select_(splits == 1, Int32(-1), split))
        return SplitWork._make((*work[:-1], work.valid & (split < splits), own, splits))

    def keys(self, at: At, work: Any, arguments: Arguments) -> Any:
        whole = TileScheduler.keys(self, at, work, arguments)
        if not self.config.splits:
            return whole
        split = cutlass.max(work.split, Int32(0))
        return run(whole, *run_of(whole.count, split, work.splits, self.config.share))
