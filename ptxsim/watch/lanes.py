"""Accesses by the lanes of one warp, which nothing orders but what the warp executes together.

A warp's lanes need not run in step (PTX ISA, "bar.warp.sync": threads that communicate through memory store,
execute it, and load). Accesses of two lanes to the same bytes, one of them a store, are a race unless the
warp has executed in between an instruction that orders its lanes: bar.warp.sync, or another one that is .sync
or .aligned, for which all of its lanes have to come; or one by which a lane has learned of another one: a
wait for an mbarrier at which that lane has arrived, or a strong load. A lane that arrives, signals or starts
an asynchronous operation alone says nothing of other lanes' accesses that nothing has ordered. Lanes run in
step here: values do not show such a race.

Watched are plain loads and stores of shared memory, plain stores of global memory and loads of what they
wrote, cp.async from where a lane waits for it, and reads of bulk stores from where a lane waits for them. Of
the lanes that read the same bytes at once the last one is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.clock import NOTHING, Clock, Key
from ptxsim.watch.order import Order, over
from ptxsim.watch.shadow import Shadow, Where

LANES = 32
MOST = 256
"""Accesses that are remembered; only loops without any synchronisation make more."""
_stamps = count(1)
_EVERYONE = np.arange(LANES)


@dataclass(eq=False)
class LaneTable:
    """Lanes that last met each granule of a CTA's shared memory, as LANES * stamp + lane."""

    writer: NDArray[np.int64]
    reader: NDArray[np.int64]

    @classmethod
    def of(cls, size: int) -> LaneTable:
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int64))


class LaneAccess(NamedTuple):
    """Access `number` by `lanes`, to as many granules each; None for all lanes."""

    number: int
    shadow: Shadow | None
    """Shadow of a CTA's shared memory, None for global memory."""
    where: Where
    lanes: NDArray[np.bool_] | None
    writes: bool

    def lane_of_each(self) -> NDArray[Any]:
        """Lane that meets each of the granules."""
        lanes = _EVERYONE if self.lanes is None else np.flatnonzero(self.lanes)
        where = self.where
        granules = where.stop - where.start if isinstance(where, slice) else len(where)
        return lanes if granules == len(lanes) else lanes.repeat(granules // len(lanes))

    def granules(self) -> NDArray[np.intp]:
        where = self.where
        return np.arange(where.start, where.stop) if isinstance(where, slice) else where

    def says(self, lanes: NDArray[np.bool_]) -> bool:
        """True if it is no more than what these lanes did: they took part alone, or wrote all that others
        wrote as well."""
        if self.lanes is not None and not (self.lanes & ~lanes).any():
            return True
        if not self.writes:
            return False
        granules = self.granules()
        return set(granules[lanes[self.lane_of_each()]].tolist()) == set(granules.tolist())


@dataclass(eq=False)
class LaneLog:
    """Accesses of a warp since its lanes were ordered last."""

    entries: list[LaneAccess] = field(default_factory=list)
    _writes: bool = False
    _marked: int = 0
    _stamp: int = 0

    def clear(self, own: Clock, agent: int) -> None:
        """The lanes of the warp, an agent with a clock of its own, are ordered: what it does from now on
        belongs to another epoch."""
        self._keep([])
        own.epochs[agent] += 1

    def learn(self, order: Order, clock: Clock) -> None:
        """Lanes learn what a clock says: accesses of others are over by then."""
        self._keep([entry for entry in self.entries if not over(order.accesses[entry.number], clock)])

    def _keep(self, entries: list[LaneAccess]) -> None:
        self.entries, self._marked = entries, 0
        self._writes = any(entry.writes for entry in entries)

    def add(self, order: Order, access: LaneAccess, same: bool) -> None:
        """The warp accesses shared memory; `same` if it writes what is there already."""
        if not same:
            self.meet(order, access)
        self.keep(access)

    def keep(self, access: LaneAccess) -> None:
        if len(self.entries) < MOST:
            self.entries.append(access)
            self._writes |= access.writes

    def withheld(self, order: Order, lanes: NDArray[np.bool_] | None) -> frozenset[Key]:
        """Accesses that what these lanes signal, None for all, says nothing of."""
        if lanes is None:
            return NOTHING
        return frozenset(order.accesses[x.number].key for x in self.entries if not x.says(lanes))

    def meet_globally(self, order: Order, access: LaneAccess, granule: int) -> None:
        """The warp accesses what it wrote itself to global memory."""
        for entry in self.entries:
            if entry.shadow is not None:
                continue
            _, mine, theirs = np.intersect1d(access.granules(), entry.granules(), return_indices=True)
            lanes, others = access.lane_of_each()[mine], entry.lane_of_each()[theirs]
            wrong = np.flatnonzero(lanes != others)
            if len(wrong):
                place = f"global memory at {int(access.granules()[mine[wrong[0]]]) * granule:#x}"
                _report(order, access, entry, int(lanes[wrong[0]]), int(others[wrong[0]]), place)
                return

    def meet(self, order: Order, access: LaneAccess) -> None:
        """The warp accesses shared memory, perhaps what other lanes did before."""
        if not self.entries or not (access.writes or self._writes):
            return
        if not self._marked:
            self._stamp = next(_stamps) * LANES
        for entry in self.entries[self._marked :]:
            if entry.shadow is not None:
                table = _table(entry.shadow)
                marks = table.writer if entry.writes else table.reader
                marks[entry.where] = self._stamp + entry.lane_of_each()
        self._marked = len(self.entries)
        assert access.shadow is not None
        table, mine = _table(access.shadow), self._stamp + access.lane_of_each()
        for met, wrote in ((table.writer, True), (table.reader, False)):
            if not wrote and not access.writes:
                continue
            found = met[access.where]
            wrong = (found >= self._stamp) & (found != mine) & (found < self._stamp + LANES)
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                granule, other = int(access.granules()[first]), int(found[first]) % LANES
                entry = next(
                    entry
                    for entry in reversed(self.entries)
                    if entry.writes == wrote
                    and entry.shadow is access.shadow
                    and ((entry.granules() == granule) & (entry.lane_of_each() == other)).any()
                )
                lane, place = int(access.lane_of_each()[first]), access.shadow.describe(granule)
                _report(order, access, entry, lane, other, place)


def _report(order: Order, access: LaneAccess, before: LaneAccess, lane: int, other: int, place: str) -> None:
    text = (
        f"lane {lane} {'overwrites' if access.writes else 'reads'} what lane {other} "
        f"{'wrote' if before.writes else 'read'}, and nothing orders the warp's lanes in between, in {place}"
    )
    order.report("lanes", text, access.number, before.number)


def _table(shadow: Shadow) -> LaneTable:
    if shadow.lanes is None:
        shadow.lanes = LaneTable.of(shadow.size)
    return shadow.lanes
