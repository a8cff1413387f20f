"""Launches that follow one another in a stream, and those that may run at the same time.

A launch with programmatic stream serialization may begin when all CTAs of the launch before it have
executed griddepcontrol.launch_dependents or exited, and not only when that launch is over. What the launch
before writes may be read, and what it reads or writes may be overwritten, by whoever knows that a thread has
executed griddepcontrol.wait (PTX ISA, "griddepcontrol"). Here launches run one after another, so that without
the wait the values are right all the same; on a chip they may not be.

For each launch that may still run a cluster has an agent (order.py) of which nobody knows that it is over
until that wait. Its accesses are what the launch did; those to memory whose contents have changed since,
which the host has used again for something else, are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.clock import Clock
from ptxsim.watch.findings import Finding, Findings
from ptxsim.watch.marks import Granules, Marks
from ptxsim.watch.order import Access, Order

Cta = tuple[int, int]
"""(cluster, rank)"""
Contents = Callable[[Granules, int], NDArray[np.uint8] | None]
"""Bytes [granules, size] of global memory, at granules of a size; None where some cannot be read."""


class Log(NamedTuple):
    """Accesses to global memory: which was the last at each granule, and (cluster, access) by number, from 1
    on."""

    marks: Marks
    accesses: list[tuple[int, Access]]

    @classmethod
    def empty(cls, granule: int) -> Log:
        return cls(Marks(granule), [])


@dataclass(eq=False)
class Past:
    """A launch that has run here. `running` are those that may run while it begins, `awaited` those that are
    over once one of its threads has executed griddepcontrol.wait."""

    kernel: str
    running: tuple[Past, ...]
    awaited: tuple[Past, ...]
    waited: bool
    """True if a thread has executed griddepcontrol.wait."""
    waited_first: bool
    """True if a thread has done so before all CTAs had let the next launch begin."""
    writes: Log
    reads: Log
    values: NDArray[np.uint8] | None
    """Bytes that it left, at the granules in the order of `writes.marks.all()`."""

    def forget_changes(self, contents: Contents) -> None:
        """Forget writes that something outside of launches has overwritten since."""
        marks = self.writes.marks
        where = marks.all()
        now = contents(where, marks.granule)
        if self.values is None or now is None:
            self.writes, self.values = Log.empty(marks.granule), None
        else:
            changed = (self.values != now).any(axis=1)
            if changed.any():
                marks.put(where[changed], 0)
            self.values = now[~changed]


@dataclass
class Dependence:
    """Order of one launch after others. `earlier` are those that may run when it begins; in each cluster the
    agent of the i-th of them has the number i."""

    findings: Findings
    granule: int
    earlier: tuple[Past, ...] = ()
    awaited: tuple[Past, ...] = ()
    remembers: bool = False
    """True if reads are remembered: the next launch may begin before they are over."""
    _waits: set[Cta] = field(default_factory=set)
    _first: dict[Cta, bool] = field(default_factory=dict)
    """For each CTA that let the next launch begin: whether it knew of a wait then."""
    _reads: Log = field(init=False)

    def __post_init__(self) -> None:
        self._reads = Log.empty(self.granule)

    @property
    def reads_matter(self) -> bool:
        return self.remembers or bool(self.earlier)

    def near(self, low: int, stop: int) -> bool:
        """True if a read between two addresses has to be told."""
        return self.remembers or any(past.writes.marks.near(low, stop) for past in self.earlier)

    def begin(self, order: Order) -> None:
        """A cluster begins: its order gets the agents of earlier launches."""
        for number, past in enumerate(self.earlier):
            agent = order.agent(f"earlier launch {number} ({past.kernel})")
            assert agent == number

    def wait(self, order: Order, agent: int, cta: Cta, line: int) -> None:
        """An agent executes griddepcontrol.wait, on a PTX line."""
        self._waits.add(cta)
        clock = order.clocks[agent]
        for number, past in enumerate(self.earlier):
            if past in self.awaited and not clock.epochs[number]:
                clock.epochs[number] = clock.fenced[number] = 1
                order.learns(agent, (line,))

    def launch(self, order: Order, agent: int, cta: Cta) -> None:
        """An agent executes griddepcontrol.launch_dependents."""
        self._first.setdefault(cta, cta in self._waits and self._all_known(order.clocks[agent]))

    def _all_known(self, clock: Clock) -> bool:
        return all(_over(clock, number) for number, past in enumerate(self.earlier) if past in self.awaited)

    def reads(self, order: Order, number: int, where: Granules, clock: Clock) -> None:
        """Access `number` of a cluster reads."""
        if self.remembers:
            marks, accesses = self._reads
            accesses.append((order.number, order.accesses[number]))
            marks.put(where, len(accesses))
        for agent, past in enumerate(self.earlier):
            if not _over(clock, agent):
                self._compare(past.kernel, past.writes, order.accesses[number], where, "reads what", "writes")

    def writes(self, order: Order, number: int, where: Granules, clock: Clock) -> None:
        """Access `number` of a cluster writes."""
        for agent, past in enumerate(self.earlier):
            if not _over(clock, agent):
                access = order.accesses[number]
                self._compare(past.kernel, past.writes, access, where, "overwrites what", "writes")
                self._compare(past.kernel, past.reads, access, where, "overwrites what", "reads")

    def _compare(self, kernel: str, log: Log, access: Access, where: Granules, does: str, did: str) -> None:
        """Report where an access meets what an earlier launch, of a kernel, did."""
        for number, granule in log.marks.met(self._converted(where, log.marks.granule)):
            cluster, before = log.accesses[number - 1]
            text = (
                f"{access.who} {does} an earlier launch {did} before it knows of a griddepcontrol.wait, "
                f"in global memory at {granule * log.marks.granule:#x} "
                f"(by {before.who} of cluster {cluster} of {kernel})"
            )
            self.findings.add(Finding("launch order", text, access.instruction, before.instruction))

    def _converted(self, where: Granules, granule: int) -> Granules:
        """Numbers of granules of another size."""
        if granule >= self.granule:
            return where // (granule // self.granule)
        each = self.granule // granule
        return (where[:, None] * each + np.arange(each)).reshape(-1)

    def past(self, kernel: str, writes: Log, contents: Contents) -> Past:
        """This launch as an earlier one, once it has run."""
        values = contents(writes.marks.all(), writes.marks.granule)
        first = any(self._first.get(cta, True) for cta in self._waits)
        waited = bool(self._waits)
        return Past(kernel, self.earlier, self.awaited, waited, first, writes, self._reads, values)


class Launches:
    """Launches of a stream, as far as later ones may depend on them."""

    def __init__(self) -> None:
        self._last: Past | None = None

    def dependence(self, findings: Findings, granule: int, early: bool, contents: Contents) -> Dependence:
        """Dependence of the next launch; `early` if it may begin before the last one is over."""
        last = self._last
        if last is None or not early:
            return Dependence(findings, granule)
        over = last.awaited if last.waited_first else ()
        earlier = (last, *(past for past in last.running if past not in over))
        for past in earlier:
            past.forget_changes(contents)
        return Dependence(findings, granule, earlier, (last, *(last.awaited if last.waited else ())))

    def add(self, past: Past) -> None:
        self._last = past


def _over(clock: Clock, agent: int) -> bool:
    """True if whoever holds a clock knows that an earlier launch is over."""
    return bool(clock.epochs[agent]) or any(other.epochs[agent] for other in clock.others.values())
