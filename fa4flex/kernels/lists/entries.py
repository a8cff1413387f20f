"""Entries of a list that count: those of units that are there, each once.

A warpgroup looks at all of them, and leaves a bit for each. Nothing else can begin before, so that a warp
asks for many at once. Most lists ascend, as the library's own do, and then no unit stands there twice. Of
others, each entry is put into a table by its unit, open to the next place where two units meet; of entries of
one unit, the first stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import any_of, sync
from fa4flex.kernels.lists.config import MOST_ENTRIES, WORDS, ListsConfig
from fa4flex.kernels.lists.resources import Shared
from fa4flex.kernels.lists.roles import ENTRIES
from fa4flex.kernels.lists.tiles import Part, group_count
from fa4flex.kernels.lists.union import NOTHING, United

THREADS = 128
"""Threads that look at entries."""

TOGETHER = 8
"""Words of the bits, and so entries of a lane, that a warp looks at together."""

AHEAD = 4
"""Entries that a thread has asked for while it looks up one."""

SPREAD = 0x9E3779B1
"""Knuth's multiplier: units that follow each other are far apart in the table."""


@dataclass(frozen=True)
class Entries:
    """A row of the lists: its first `count` entries are read, and units from 0 to `units` are there."""

    ids: cute.Tensor
    count: Int32
    units: Int32

    def given(self, i: Int32) -> Any:
        """The contents of entry i, of a list that has some; of the nearest one where there is no such entry.
        Nothing waits for it before it is used."""
        return self.ids[cutlass.max(cutlass.min(i, self.count - 1), Int32(0))]

    def checked(self, i: Int32, given: Any) -> Int32:
        """Unit of entry i, at which this was given, or NOTHING."""
        there = (i >= 0) & (i < self.count) & (given >= 0) & (given < self.units)
        return Int32(select_(there, Int32(given), Int32(NOTHING)))

    def look(self, shared: Shared, thread: Int32) -> None:
        """A warpgroup's: leave the bits of the entries that count. Threads meet after this to read them."""
        _look(self, shared, thread)

    def found(self, shared: Shared) -> Int32:
        """Number of entries up to the last one that counts, once that is known."""
        return Int32(_last_of(self, shared.bits))

    def at(self, shared: Shared, i: Int32) -> tuple[Any, Boolean, Int32]:
        """The contents of an entry, which nothing waits for; whether it counts; and that it does so for all
        rows of a tile."""
        return self.ids[i], (shared.bits[i // 32] >> (i % 32)) & 1 != 0, Int32(NOTHING)


def entries_of(part: Part, arguments: Arguments, config: ListsConfig) -> Entries | United:
    """The row of the lists that a tile's queries share, or the rows of the lists that they have."""
    batch, heads, _, most = arguments.ids.shape
    unit, end = Int32(arguments.unit), Int32(arguments.end)
    # Groups are as many as heads of lists, or several of them share one.
    groups = group_count(arguments)
    of_head = select_(Int32(batch) == 1, Int32(0), part.b), part.group // (groups // Int32(heads))
    units = (end + unit - 1) // unit
    if config.united > 1:
        counts = None if arguments.counts is None else arguments.counts[(*of_head, None)]
        ids = arguments.ids[(*of_head, None, None)]
        return United(ids, counts, part.row * config.united, config.united, units)
    at, count = (*of_head, part.row), Int32(most)
    if arguments.counts is not None:
        given = Int64(arguments.counts[at])
        count = Int32(cutlass.max(cutlass.min(given, Int64(count)), Int64(0)))
    return Entries(arguments.ids[(*at, None)], count, units)


@cute.jit
def _look(entries: cutlass.Constexpr[Entries], shared: cutlass.Constexpr[Shared], thread: Int32) -> None:
    repeated = Boolean(False)
    lane, each = thread % 32, 32 * TOGETHER
    # The first bits are read even of a list without entries.
    for base in cutlass.range(thread // 32 * each, cutlass.max(entries.count, Int32(1)), 4 * each, unroll=1):
        word, again = _words(entries, base, lane)
        repeated = repeated | again
        if lane < TOGETHER:
            shared.bits[base // 32 + lane] = word
    if any_of(ENTRIES, repeated):
        _look_again(entries, shared, thread)


def _words(entries: Entries, base: Int32, lane: Int32) -> tuple[Int32, Boolean]:
    """A warp's: the bits of entries from `base` on, word w in lane w of TOGETHER; and whether one of a lane's
    is not above the one before. All are asked for before any is looked at."""
    places = [base - 1, *(base + 32 * w + lane for w in range(TOGETHER))]
    given = [entries.given(i) for i in places]
    left, *units = [entries.checked(i, x) for i, x in zip(places, given)]
    word, repeated = Int32(0), Boolean(False)
    for w, unit in enumerate(units):
        # A lane's left neighbour, which for the first lane is the last one of the word before.
        before = select_(lane == 0, left, cute.arch.shuffle_sync(unit, (lane + 31) % 32))
        left = cute.arch.shuffle_sync(unit, 31)
        ascends = (places[w + 1] == 0) | ((before >= 0) & (before < unit))
        repeated = repeated | ((unit >= 0) & ~ascends)
        word = select_(lane == w, Int32(cute.arch.vote_ballot_sync(unit >= 0)), word)
    return word, repeated


@cute.jit
def _look_again(
    entries: cutlass.Constexpr[Entries], shared: cutlass.Constexpr[Shared], thread: Int32
) -> None:
    """Leave the bits of the first entry of each unit alone. So many entries are on their way while one is put
    into the table."""
    size = Int32(64)
    while size < 2 * entries.count:
        size = size * 2
    for place in cutlass.range(thread, size, THREADS, unroll=1):
        shared.places[place, 0], shared.places[place, 1] = Int32(NOTHING), Int32(MOST_ENTRIES)
    for word in cutlass.range(thread, WORDS, THREADS, unroll=1):
        shared.bits[word] = Int32(0)
    given = tuple([entries.given(thread + n * THREADS) for n in range(AHEAD)])
    sync(ENTRIES)
    for i in cutlass.range(thread, entries.count, THREADS, unroll=1):
        unit = entries.checked(i, given[0])
        given = (*given[1:], entries.given(i + AHEAD * THREADS))
        if unit >= 0:
            _put(shared.places, size - 1, unit, i)
    sync(ENTRIES)
    for place in cutlass.range(thread, size, THREADS, unroll=1):
        first = shared.places[place, 1]
        if first < MOST_ENTRIES:
            cute.arch.atomic_or(shared.bits.iterator + first // 32, Int32(1) << (first % 32))


@cute.jit
def _put(places: cute.Tensor, mask: Int32, unit: Int32, i: Int32) -> None:
    """Put an entry where its unit stands in the table, or where there is none yet."""
    place, going = Int32((Uint32(unit) * Uint32(SPREAD)) >> 16) & mask, Boolean(True)
    while going:
        units = places[None, 0].iterator + place
        old = cute.arch.atomic_cas(units, cmp=Int32(NOTHING), val=unit)
        if (old == NOTHING) | (old == unit):
            cute.arch.atomic_min(places[None, 1].iterator + place, i)
            going = Boolean(False)
        else:
            place = (place + 1) & mask


@cute.jit
def _last_of(entries: cutlass.Constexpr[Entries], bits: cute.Tensor) -> Int32:
    """A warp's: number of entries up to the last one that counts."""
    last = Int32(0)
    for word in cutlass.range(cute.arch.lane_idx(), (entries.count + 31) // 32, 32, unroll=1):
        some = bits[word]
        if some != 0:
            last = word * 32 + 32 - Int32(cute.arch.clz(some))
    return Int32(cute.arch.warp_redux_sync(last, "max"))
