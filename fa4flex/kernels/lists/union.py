"""Lists of neighbouring rows, united: each unit once, with the rows that list it.

Tokens next to each other choose much the same, and have windows that are much the same. Where few heads share
keys, a tile has the queries of several rows of the lists, and visits what any of these lists. A warpgroup
asks for all entries at once and compares each with all others: they are few. Units ascend, so that results do
not depend on which thread was first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute, select_

from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.lists.config import MOST_UNITED
from fa4flex.kernels.lists.resources import Shared
from fa4flex.kernels.lists.roles import ENTRIES

THREADS = 128
"""Threads that unite lists."""

EACH = MOST_UNITED // THREADS
"""Entries of a thread."""


@dataclass(frozen=True)
class United:
    """Rows of the lists from `row` on, `rows` of them: entry e is number e % most of row e // most. ids: of a
    head, [row, most]; counts: entries of each row that are read, or None; units from 0 to `units` are
    there."""

    ids: cute.Tensor
    counts: cute.Tensor | None
    row: Int32
    rows: int
    units: Int32

    @property
    def most(self) -> Int32:
        return Int32(self.ids.shape[1])

    @property
    def every(self) -> Int32:
        """Number of entries."""
        return self.most * self.rows

    def found(self, shared: Shared) -> Int32:
        """Number of units, once they are known."""
        return Int32(shared.bits[0])

    def at(self, shared: Shared, place: Int32) -> tuple[Int32, Boolean, Int32]:
        """A unit by its place, that it counts, and the bits of the rows that list it."""
        assert shared.united is not None
        return shared.united[place, UNITS], Boolean(True), shared.united[place, BITS]

    def look(self, shared: Shared, thread: Int32) -> None:
        """A warpgroup's: find the units. Threads meet after this to read them."""
        _unite(self, shared, thread)

    def given(self, e: Int32) -> tuple[Any, Any]:
        """The contents of an entry, or of one that is there, and how many entries of its row are read.
        Nothing waits for it before it is used."""
        t, i = self.place(e)
        row = cutlass.min(self.row + t, Int32(self.ids.shape[0]) - 1)
        return self.ids[row, i], self.most if self.counts is None else self.counts[row]

    def checked(self, e: Int32, given: tuple[Any, Any]) -> Int32:
        """Unit of an entry at which this was given, or NOTHING."""
        (unit, count), (t, i) = given, self.place(e)
        there = (e < self.every) & (self.row + t < Int32(self.ids.shape[0])) & (Int64(i) < Int64(count))
        return Int32(select_(there & (unit >= 0) & (unit < self.units), Int32(unit), Int32(NOTHING)))

    def place(self, e: Int32) -> tuple[Int32, Int32]:
        """Row, from the first one on, and number in it."""
        kept = cutlass.min(e, self.every - 1)
        return kept // self.most, kept % self.most


NOTHING = -1
"""Unit of an entry that lists none, and of a place that none has taken."""

ENTRY, FIRST, UNITS, BITS = range(4)
"""Columns of shared memory: units as they are listed; the bits of the rows that list them, of the first entry
of each, and 0 of others; units that ascend, and their bits."""


@cute.jit
def _unite(united: cutlass.Constexpr[United], shared: cutlass.Constexpr[Shared], thread: Int32) -> None:
    table, mine = shared.united, _entries(united, thread)
    assert table is not None
    for n in cutlass.range_constexpr(EACH):
        table[thread + n * THREADS, ENTRY] = mine[n]
    sync(ENTRIES)
    bits = cute.make_rmem_tensor((EACH,), Int32)
    bits.fill(0)
    before = cute.make_rmem_tensor((EACH,), Int32)
    before.fill(0)
    for t in cutlass.range_constexpr(united.rows):
        first, row = united.most * t, Int32(1) << Int32(t)
        for i in cutlass.range(united.most, unroll=4):
            unit = table[first + i, ENTRY]
            for n in cutlass.range_constexpr(EACH):
                same = unit == mine[n]
                bits[n] = select_(same, bits[n] | row, bits[n])
                before[n] = select_(same & (first + i < thread + n * THREADS), Int32(1), before[n])
    for n in cutlass.range_constexpr(EACH):
        new = (mine[n] >= 0) & (before[n] == 0)
        bits[n] = select_(new, bits[n], Int32(0))
        table[thread + n * THREADS, FIRST] = bits[n]
    sync(ENTRIES)
    total, below = Int32(0), before
    below.fill(0)
    for e in cutlass.range(united.every, unroll=4):
        unit, new = table[e, ENTRY], table[e, FIRST] != 0
        total += select_(new, Int32(1), Int32(0))
        for n in cutlass.range_constexpr(EACH):
            below[n] += select_(new & (unit < mine[n]), Int32(1), Int32(0))
    for n in cutlass.range_constexpr(EACH):
        if bits[n] != 0:
            table[below[n], UNITS], table[below[n], BITS] = mine[n], bits[n]
    if thread == 0:
        shared.bits[0] = total
        if total == 0:
            # The first unit is read even where there is none.
            table[0, UNITS], table[0, BITS] = Int32(NOTHING), Int32(0)


def _entries(united: United, thread: Int32) -> list[Int32]:
    """Units of a thread's entries, all of which are asked for before any is looked at."""
    places = [thread + n * THREADS for n in range(EACH)]
    given = [united.given(e) for e in places]
    return [united.checked(e, x) for e, x in zip(places, given)]
