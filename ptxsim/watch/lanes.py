"""Loads and stores of shared memory by the lanes of one warp, which nothing orders but what the warp executes
together.

A warp's lanes need not run in step (PTX ISA, "bar.warp.sync": threads that communicate through memory store,
execute it, and load). Accesses of two lanes to the same bytes, one of them a store, are a race unless the
warp has executed in between an instruction that orders its lanes: bar.warp.sync, or another one that is .sync
or .aligned, for which all of its lanes have to come; or one by which a lane may have learned of another one,
such as a wait for an mbarrier, or a strong access. Lanes run in step here: values do not show such a race.

Of the lanes that read the same bytes at once the last one is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.order import Order
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
    shadow: Shadow
    where: Where
    lanes: NDArray[np.bool_] | None
    writes: bool


@dataclass(eq=False)
class LaneLog:
    """Accesses of a warp since its lanes were ordered last."""

    entries: list[LaneAccess] = field(default_factory=list)
    _writes: bool = False
    _marked: int = 0
    _stamp: int = 0

    def clear(self) -> None:
        self.entries.clear()
        self._writes, self._marked = False, 0

    def add(self, order: Order, access: LaneAccess, same: bool) -> None:
        """The warp accesses shared memory; `same` if it writes what is there already."""
        if self.entries and (access.writes or self._writes) and not same:
            self._compare(order, access)
        if len(self.entries) < MOST:
            self.entries.append(access)
            self._writes |= access.writes

    def _compare(self, order: Order, access: LaneAccess) -> None:
        if not self._marked:
            self._stamp = next(_stamps) * LANES
        for entry in self.entries[self._marked :]:
            table = _table(entry.shadow)
            (table.writer if entry.writes else table.reader)[entry.where] = self._stamp + _lanes(entry)
        self._marked = len(self.entries)
        table, mine = _table(access.shadow), self._stamp + _lanes(access)
        for met, wrote in ((table.writer, True), (table.reader, False)):
            if not wrote and not access.writes:
                continue
            found = met[access.where]
            wrong = (found >= self._stamp) & (found != mine) & (found < self._stamp + LANES)
            if wrong.any():
                self._report(order, access, int(np.flatnonzero(wrong)[0]), int(found[wrong][0]), wrote)

    def _report(self, order: Order, access: LaneAccess, first: int, met: int, wrote: bool) -> None:
        granule = int(np.arange(access.shadow.size)[access.where][first])
        lane, other = int(_lanes(access)[first]), met % LANES
        before = next(
            entry.number
            for entry in reversed(self.entries)
            if entry.writes == wrote and entry.shadow is access.shadow and _meets(entry, granule, other)
        )
        text = (
            f"lane {lane} {'overwrites' if access.writes else 'reads'} what lane {other} "
            f"{'wrote' if wrote else 'read'}, and nothing orders the warp's lanes in between, "
            f"in {access.shadow.describe(granule)}"
        )
        order.report("lanes", text, access.number, before)


def _meets(entry: LaneAccess, granule: int, lane: int) -> bool:
    where = np.arange(entry.shadow.size)[entry.where]
    return bool(((where == granule) & (_lanes(entry) == lane)).any())


def _table(shadow: Shadow) -> LaneTable:
    if shadow.lanes is None:
        shadow.lanes = LaneTable.of(shadow.size)
    return shadow.lanes


def _lanes(access: LaneAccess) -> NDArray[Any]:
    """The lane that meets each of the granules."""
    lanes = _EVERYONE if access.lanes is None else np.flatnonzero(access.lanes)
    where = access.where
    granules = where.stop - where.start if isinstance(where, slice) else len(where)
    return lanes if granules == len(lanes) else lanes.repeat(granules // len(lanes))
