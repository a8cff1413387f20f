"""Orders in which blocks take the tiles of a mixed batch, by their numbers: of few rows 0, 1, and so on, of
many -1, -2, and so on, or NONE."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute, select_

from fa4flex.kernels.common import next_tile
from fa4flex.kernels.mixed_sm90.handed import Noted
from fa4flex.kernels.mixed_sm90.sequences import Totals

NONE = -(1 << 31)
"""No tile is left."""


def numbered(few: Boolean, index: Int32) -> Int32:
    """Number of a tile by its kind and its number among these."""
    return select_(few, index, -1 - index)


class Alternating:
    """Tiles of few rows are spread evenly among those of many: number n of all is one of few where their
    share of the tiles up to n passes a whole number."""

    def begins(self, totals: Totals) -> Int32:
        """Nothing depends on it."""
        return Int32(0)

    @cute.jit
    def first(self, noted: Noted) -> Int32:
        return self.kind(Int32(cute.arch.block_idx()[0]), noted)

    @cute.jit
    def following(self, number: Int32, noted: Noted, counter: cute.Tensor) -> Int32:
        return self.kind(next_tile.take(counter, Int32(cute.arch.grid_dim()[0])), noted)

    @cute.jit
    def finish(self, counter: cute.Tensor) -> None:
        next_tile.finish(counter, Int32(cute.arch.grid_dim()[0]))

    @cute.jit
    def kind(self, number: Int32, noted: Noted) -> Int32:
        """Where there are none of few, nothing is divided: a division of 64 bits takes longer than all else
        that begins a tile."""
        found = numbered(Boolean(False), number)
        if noted.few > 0:
            every = Int64(noted.few + noted.many)
            before = Int32(Int64(number) * Int64(noted.few) // every)
            upto = Int32(Int64(number + 1) * Int64(noted.few) // every)
            few = upto > before
            found = numbered(few, select_(few, before, number - before))
        return select_(number < noted.few + noted.many, found, Int32(NONE))


class ByKind:
    """A block has one kind of tile as long as there is one, and then the other. So many blocks begin with few
    rows that both kinds should run out together. Each kind has a counter.

    A block that began with a tile asks each counter once in vain, and who asks last leaves it as it was
    found. Others ask for nothing.
    """

    def begins(self, totals: Totals) -> Int32:
        """Blocks that begin with few rows: by the work, but each block that can has a tile."""
        blocks = _blocks(totals)
        wanted = Int32(Float32(blocks) * totals.work + Float32(0.5))
        return cutlass.min(cutlass.max(wanted, blocks - totals.many), totals.few)

    @cute.jit
    def first(self, noted: Noted) -> Int32:
        block = Int32(cute.arch.block_idx()[0])
        few, before = _own(noted)
        found = numbered(few, select_(few, before, block - before))
        return select_(block < _blocks(noted), found, Int32(NONE))

    @cute.jit
    def following(self, number: Int32, noted: Noted, counter: cute.Tensor) -> Int32:
        few = number >= 0
        found = self.take(few, noted, counter)
        if found == NONE:
            own, _ = _own(noted)
            if few == own:
                found = self.take(not few, noted, counter)
        return found

    def finish(self, counter: cute.Tensor) -> None:
        """Nothing is left to do."""

    @cute.jit
    def take(self, few: Boolean, noted: Noted, counter: cute.Tensor) -> Int32:
        """One warp's: the next tile of a kind."""
        blocks = _blocks(noted)
        total = select_(few, noted.few, noted.many)
        begun = select_(few, noted.begins, blocks - noted.begins)
        taken = Int32(0)
        if total > 0 and cute.arch.lane_idx() == 0:
            place = counter.iterator + select_(few, Int32(0), Int32(1))
            taken = cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="gpu")
            if taken == total - begun + blocks - 1:
                cute.arch.store(place, Int32(0), sem="relaxed", scope="gpu")
        index = begun + cute.arch.shuffle_sync(taken, 0)
        return select_(index < total, numbered(few, index), Int32(NONE))


def _blocks(of: Noted | Totals) -> Int32:
    """Blocks that begin with a tile."""
    return cutlass.min(Int32(cute.arch.grid_dim()[0]), of.few + of.many)


def _own(noted: Noted) -> tuple[Boolean, Int32]:
    """(whether this block begins with few rows; blocks before it that do). Those of both kinds lie side by
    side."""
    block, blocks = Int32(cute.arch.block_idx()[0]), cutlass.max(_blocks(noted), Int32(1))
    before, upto = (n * noted.begins // blocks for n in (block, block + 1))
    return upto > before, before


ORDERS: dict[str, Any] = {"kinds": ByKind, "tiles": Alternating}
