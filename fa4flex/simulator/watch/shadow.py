"""What is known of each piece of a memory: who wrote it last, and who has read it since.

The rules are those of a happens-before race detector with epochs (Flanagan and Freund, "FastTrack", 2009),
for memory that warps, TMA and tensor cores share. A piece ("granule") is the smallest that one instruction
touches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4flex.simulator.watch.clock import Clock
from fa4flex.simulator.watch.order import ASYNC, Describe, Order

NOBODY = -1
Where = NDArray[np.intp] | slice
"""Granules: numbers or a range."""


class Shadow:
    """Of `granules` pieces; `describe` turns a granule's number into words for reports."""

    def __init__(self, order: Order, granules: int, describe: Describe) -> None:
        self.order, self.describe, self.size = order, describe, granules
        self.writer = np.full(granules, NOBODY, np.int32)
        self.readers: dict[int, NDArray[np.int32]] = {}
        """By agent: the number of its last read of each granule since it was written, or NOBODY."""

    def read(self, number: int, where: Where, clock: Clock) -> None:
        """Access `number` reads; `clock` is what its agent knew when it began."""
        access = self.order.accesses[number]
        for before in _distinct(self.writer[where]):
            if before == NOBODY:
                self._report("uninitialised", "reads what nobody wrote", number, where, before, None)
            elif self.order.accesses[before].agent == access.agent and access.load < 0:
                continue
            elif not self.order.known(before, clock):
                self._report("race", "reads too early", number, where, before, before)
            elif access.proxy == ASYNC and not self.order.visible(before, clock):
                self._report("missing proxy fence", "reads generic writes", number, where, before, before)
        mine = self.readers.get(access.agent)
        if mine is None:
            mine = self.readers[access.agent] = np.full(self.size, NOBODY, np.int32)
        mine[where] = number

    def write(self, number: int, where: Where, clock: Clock) -> None:
        """Access `number` writes; `clock` is what its agent knew when it began."""
        access = self.order.accesses[number]
        for before in _distinct(self.writer[where]):
            if before == NOBODY or (self.order.accesses[before].agent == access.agent and access.load < 0):
                continue
            if access.reduces and self.order.accesses[before].reduces:
                continue
            if not self.order.known(before, clock):
                self._report("race", "overwrites too early a result", number, where, before, before)
        for agent, numbers in self.readers.items():
            if agent == access.agent and access.load < 0:
                continue
            for before in _distinct(numbers[where]):
                if before != NOBODY and not self.order.known(before, clock):
                    self._report("race", "overwrites what is still read", number, where, before, before)
        self.writer[where] = number
        for numbers in self.readers.values():
            numbers[where] = NOBODY

    def forget(self, where: Where) -> None:
        """The contents are gone (memory handed back, or just allocated)."""
        self.writer[where] = NOBODY
        for numbers in self.readers.values():
            numbers[where] = NOBODY

    def _report(self, kind: str, text: str, number: int, where: Where, met: int, before: int | None) -> None:
        place = self.describe(self._first(where, met, kind, before))
        self.order.report(kind, f"{text} in {place}", number, before)

    def _first(self, where: Where, met: int, kind: str, before: int | None) -> int:
        """The first granule about which there is something to report."""
        granules = np.arange(self.size)[where] if isinstance(where, slice) else np.asarray(where)
        for numbers in (self.writer, *self.readers.values()):
            hit = granules[numbers[granules] == met]
            if len(hit):
                return int(hit[0])
        return int(granules[0])


def _distinct(numbers: NDArray[Any]) -> list[int]:
    """Different values; nearly always there is one."""
    if numbers.size == 0:
        return []
    first = numbers.flat[0]
    if numbers.size == 1 or (numbers == first).all():
        return [int(first)]
    return [int(x) for x in np.unique(numbers)]
