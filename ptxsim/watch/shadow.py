"""Shadow of a memory: who wrote each piece last, and who has read it since.

The rules are those of a happens-before race detector with epochs (Flanagan and Freund, "FastTrack", 2009),
for memory that warps, TMA and tensor cores share. A piece ("granule") is the smallest that one instruction
touches.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.clock import Clock
from ptxsim.watch.order import ASYNC, GENERIC, Describe, Order, over, passed, withheld

NOBODY = -1
SEVERAL = -2
"""Agents have read a granule: their reads stand in the tables of each."""
ALIKE = -3
"""From here downwards: several agents have written the same to a granule. Which, is in a list."""
Where = NDArray[np.intp] | slice
"""Granules: numbers or a range."""


class Shadow:
    """Shadow of a memory of `granules` pieces; `describe` turns a granule's number into words for reports."""

    def __init__(self, order: Order, granules: int, describe: Describe) -> None:
        self.order, self.describe, self.size = order, describe, granules
        self.writer = np.full(granules, NOBODY, np.int32)
        self.reader = np.full(granules, NOBODY, np.int32)
        """The last read since it was written if one agent alone has read it, else SEVERAL or NOBODY."""
        self.barriers: NDArray[np.bool_] | None = None
        """True where an mbarrier is alive in a granule; None as long as there was none."""
        self.lanes: Any = None
        """Lanes of a warp that met each granule (lanes.LaneTable); None as long as that was not needed."""
        self._alike: list[tuple[int, ...]] = []
        """Writes that left the same values: of ALIKE, of ALIKE - 1, and so on."""
        self._places: dict[tuple[int, ...], int] = {}
        """Their indices in that list."""
        self._readers: dict[int, NDArray[np.int32]] = {}
        """Number of each agent's last read of each granule that SEVERAL have read, else NOBODY."""

    def read(self, number: int, where: Where, clock: Clock) -> None:
        """Access `number` reads; `clock` is what its agent knew when it began."""
        accesses = self.order.accesses
        access = accesses[number]
        for before in distinct(self.writer[where]):
            if before == NOBODY:
                self._report("uninitialised", "reads what nobody wrote", number, where, before, None)
            elif before <= ALIKE:
                self._read_alike(number, where, clock, before)
            elif accesses[before].agent == access.agent and access.load < 0:
                continue
            elif not over(accesses[before], clock):
                if not (access.strong and accesses[before].strong):
                    self._unordered("reads too early", number, where, clock, before)
            elif access.proxy == ASYNC and not passed(accesses[before], clock):
                self._report("missing proxy fence", "reads generic writes", number, where, before, before)
        before_me = distinct(self.reader[where])
        for before in before_me:
            if before == SEVERAL or (before >= 0 and accesses[before].agent != access.agent):
                self._read_as_well(access.agent, number, where, before_me)
                return
        self.reader[where] = number

    def _read_alike(self, number: int, where: Where, clock: Clock, met: int) -> None:
        """Several have written the same: it is enough to know one of them."""
        access, wrong = self.order.accesses[number], ""
        for before in self._alike[ALIKE - met]:
            other = self.order.accesses[before]
            if other.agent == access.agent and access.load < 0:
                return
            if over(other, clock):
                if access.proxy != ASYNC or passed(other, clock):
                    return
                wrong = "missing proxy fence"
        text = "reads generic writes" if wrong else "reads too early"
        self._report(wrong or "race", text, number, where, met, self._alike[ALIKE - met][-1])

    def _read_as_well(self, agent: int, number: int, where: Where, before: list[int]) -> None:
        """Move to the tables of each agent what others have read before."""
        for other in before:
            if other >= 0:
                granules = self._granules(where)
                theirs = granules[self.reader[granules] == other]
                self._table(self.order.accesses[other].agent)[theirs] = other
        self.reader[where] = SEVERAL
        self._table(agent)[where] = number

    def _table(self, agent: int) -> NDArray[np.int32]:
        found = self._readers.get(agent)
        if found is None:
            found = self._readers[agent] = np.full(self.size, NOBODY, np.int32)
        return found

    def write(self, number: int, where: Where, clock: Clock, same: bool = False) -> None:
        """Access `number` writes, `same` if what is there already; `clock` is what its agent knew when it
        began."""
        access = self.order.accesses[number]
        if self.barriers is not None and self.barriers[where].any():
            granules = self._granules(where)
            place = self.describe(int(granules[self.barriers[granules]][0]))
            self.order.report("mbarrier", f"writes over an mbarrier that is in use, in {place}", number)
        writers = distinct(self.writer[where])
        if same and self._agrees(number, where, writers):
            return
        for before in self._each(writers):
            if before == NOBODY or (self.order.accesses[before].agent == access.agent and access.load < 0):
                continue
            other = self.order.accesses[before]
            if (access.reduces and other.reduces) or (access.strong and other.strong):
                continue
            if not over(other, clock):
                self._unordered("overwrites too early a result", number, where, clock, before)
            elif access.proxy == ASYNC and not passed(other, clock):
                self._report(
                    "missing proxy fence", "overwrites generic writes", number, where, before, before
                )
        met = distinct(self.reader[where])
        for before in self._reads(met, where):
            other = self.order.accesses[before]
            fine = (other.agent == access.agent and access.load < 0) or (access.strong and other.strong)
            if not fine and not over(other, clock):
                self._unordered("overwrites what is still read", number, where, clock, before)
        if met != [NOBODY]:
            self._forget_reads(met, where)
        self.writer[where] = number

    def _agrees(self, number: int, where: Where, writers: list[int]) -> bool:
        """True if other warps wrote the same before: then all may write at once, and while that is read. A
        warp that repeats what it wrote itself does not agree with anyone: it may be another message."""
        accesses, agent = self.order.accesses, self.order.accesses[number].agent
        for before in self._each(writers):
            if before == NOBODY or accesses[before].proxy != GENERIC or accesses[before].agent == agent:
                return False
        for met in writers:
            mine = self.writer[where] == met
            together = (*self._each([met]), number)
            place = self._places.setdefault(together, len(self._alike))
            if place == len(self._alike):
                self._alike.append(together)
            self.writer[self._granules(where)[mine]] = ALIKE - place
        return True

    def _each(self, writers: list[int]) -> list[int]:
        """Writers, where several wrote the same, each of them."""
        if min(writers) > ALIKE:
            return writers
        return [x for met in writers for x in (self._alike[ALIKE - met] if met <= ALIKE else (met,))]

    def _reads(self, met: list[int], where: Where) -> list[int]:
        """Reads of these granules since they were written, the last of each agent; `met` is what `reader`
        holds there."""
        found = list(met)
        if SEVERAL in met:
            for numbers in self._readers.values():
                found += distinct(numbers[where])
        return [number for number in found if number >= 0]

    def _forget_reads(self, met: list[int], where: Where) -> None:
        if SEVERAL in met:
            for numbers in self._readers.values():
                numbers[where] = NOBODY
        self.reader[where] = NOBODY

    def end(self, number: int, clock: Clock, told: Set[int] = frozenset()) -> None:
        """The memory goes away, by access `number`; `clock` is what all know who have used it. What agents in
        `told` may still do was reported."""
        everywhere = slice(None)
        reads = self._reads(distinct(self.reader), everywhere)
        met = {*self._each(distinct(self.writer)), *reads} - {NOBODY, SEVERAL}
        for before in sorted(met):
            if self.order.accesses[before].agent not in told and not self.order.known(before, clock):
                place = self.describe(self._first(everywhere, before))
                text = f"exits before it knows that an access to {place} is over"
                self.order.report("unfinished", text, number, before)

    def keep_barrier(self, where: Where, alive: bool) -> None:
        """An mbarrier is initialised in these granules, or invalidated."""
        if self.barriers is None:
            self.barriers = np.zeros(self.size, np.bool_)
        self.barriers[where] = alive

    def forget(self, where: Where) -> None:
        """The contents are gone (memory handed back, or just allocated)."""
        self.writer[where] = NOBODY
        self._forget_reads(distinct(self.reader[where]), where)

    def _unordered(self, text: str, number: int, where: Where, clock: Clock, before: int) -> None:
        """Report an access that comes too early after another one, of which `clock` does not know."""
        kind = "race"
        if withheld(self.order.accesses[before], clock):
            kind, text = "lanes", f"{text}, of which another lane has signalled than did it,"
        self._report(kind, text, number, where, before, before)

    def _report(self, kind: str, text: str, number: int, where: Where, met: int, before: int | None) -> None:
        place = self.describe(self._first(where, met))
        self.order.report(kind, f"{text} in {place}", number, before)

    def _first(self, where: Where, met: int) -> int:
        """The first granule that the earlier access touched."""
        granules = self._granules(where)
        for numbers in (self.writer, self.reader, *self._readers.values()):
            hit = granules[numbers[granules] == met]
            if len(hit):
                return int(hit[0])
        return int(granules[0])

    def _granules(self, where: Where) -> NDArray[np.intp]:
        return np.arange(self.size)[where] if isinstance(where, slice) else where


def distinct(numbers: NDArray[Any]) -> list[int]:
    """Different values; nearly always there is one, and then bytes repeat."""
    content, size = numbers.tobytes(), numbers.itemsize
    if content[size:] == content[:-size]:
        return [numbers.item(0)]
    if numbers.size <= 256:
        return list(set(numbers.tolist()))
    flat = numbers.ravel()
    changed = flat[1:][flat[1:] != flat[:-1]]  # a tile has few runs of equal values: less than to sort it
    return list({flat.item(0), *changed.tolist()})
