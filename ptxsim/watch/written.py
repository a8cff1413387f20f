"""Writes of a launch to global memory: who wrote each piece last, and who meets that without an order.

Reads are compared with the writes before them and not remembered themselves: a write that comes too early
after a read is not found. Two writes that nothing orders are a race if they leave different values. CTAs of
different clusters are ordered by flags in global memory alone (flags.py).

What earlier launches did that may still run meets the accesses of this one in launches.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.clock import Clock
from ptxsim.watch.findings import Finding, Findings
from ptxsim.watch.launches import Dependence, Log
from ptxsim.watch.marks import Granules, marked
from ptxsim.watch.order import ASYNC, Order, over, passed, withheld

OWN = "own"
Changed = Callable[[], NDArray[np.bool_]]
"""Mask of the granules written that get another value."""


class Written:
    """`granule` is the bytes of global memory that are watched as one."""

    def __init__(self, granule: int, findings: Findings, dependence: Dependence) -> None:
        self.granule, self._findings, self._dependence = granule, findings, dependence
        self.log = Log.empty(granule)
        self._numbers: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self.log.marks) or self._dependence.reads_matter

    def near(self, low: int, stop: int) -> bool:
        """True if a read between two addresses has to be told."""
        return self.log.marks.near(low, stop) or self._dependence.near(low, stop)

    def read(self, order: Order, number: int, where: Granules, clock: Clock) -> bool:
        """Access `number` of a cluster reads; `clock` is what its agent knew when it began. True if it meets
        writes of its own agent."""
        own = False
        for before, granule in self.log.marks.met(where):
            wrong = self._wrong(order, number, before, clock)
            if wrong == OWN:
                own = True
            elif wrong:
                self._report(order, number, before, wrong, "reads", granule)
        if self._dependence.reads_matter:
            self._dependence.reads(order, number, where, clock)
        return own

    def write(self, order: Order, number: int, where: Granules, clock: Clock, changed: Changed) -> bool:
        """Access `number` of a cluster writes. True if it changes what its own agent wrote."""
        own = False
        mine = self._numbers.get((order.number, number)) or self._number(order, number)
        for piece, which, low, high in self.log.marks.split(where):
            inside = where[which] - piece.start
            for before, meet in marked(piece.number[inside]):
                wrong = self._wrong(order, number, before, clock)
                if wrong in ("race", "lanes", OWN):
                    meet &= changed()[which]
                if wrong == OWN:
                    own |= bool(meet.any())
                elif wrong and meet.any():
                    self._report(
                        order, number, before, wrong, "overwrites", piece.start + int(inside[meet][0])
                    )
            piece.put(inside, mine, low, high)
        if self._dependence.earlier:
            self._dependence.writes(order, number, where, clock)
        return own

    def _wrong(self, order: Order, number: int, before: int, clock: Clock) -> str:
        """The kind of finding that an access makes after a write, OWN after one of its agent, or ""."""
        access, (cluster, earlier) = order.accesses[number], self.log.accesses[before - 1]
        known: Clock | None = clock
        if cluster != order.number:
            known = clock.others.get(cluster)
        elif earlier.agent == access.agent and access.load < 0:
            return OWN
        if known is None or not over(earlier, known):
            agree = (access.strong and earlier.strong) or (access.reduces and earlier.reduces)
            lanes = known is not None and withheld(earlier, known)
            return "" if agree else "lanes" if lanes else "race"
        return "missing proxy fence" if access.proxy == ASYNC and not passed(earlier, known) else ""

    def _report(self, order: Order, number: int, before: int, kind: str, does: str, granule: int) -> None:
        access, (cluster, earlier) = order.accesses[number], self.log.accesses[before - 1]
        how = {"race": "too early", "lanes": "too early, of which another lane has signalled than did it,"}
        whose = earlier.who if cluster == order.number else f"{earlier.who} of cluster {cluster}"
        place = f"global memory at {granule * self.granule:#x}"
        text = f"{access.who} {does} {how.get(kind, 'generic writes')} in {place} (by {whose})"
        self._findings.add(Finding(kind, text, access.instruction, earlier.instruction))

    def _number(self, order: Order, number: int) -> int:
        self.log.accesses.append((order.number, order.accesses[number]))
        self._numbers[order.number, number] = len(self.log.accesses)
        return len(self.log.accesses)
