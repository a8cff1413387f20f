"""Accesses, and what is known to be over: one Order per cluster.

Every access to watched memory gets a number; shadows (shadow.py) remember numbers, and `known` tells whether
an agent may rely on an access being over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ptxsim.ptx.nodes import Instruction
from ptxsim.watch.clock import Clock, Key
from ptxsim.watch.findings import Finding, Findings
from ptxsim.watch.flags import Strength, Told

GENERIC, ASYNC = "generic", "async"
Describe = Callable[[int], str]


class Access(NamedTuple):
    """`agent` did it in its `epoch`; what is waited for by itself, such as a TMA load, is named by its bit
    `load` instead. `who` is for people."""

    agent: int
    epoch: int
    proxy: str
    who: str
    instruction: Instruction
    load: int = -1
    reduces: bool = False
    """True if it adds to what is there: two such may meet in any order."""
    strong: bool = False
    """True if it may meet others that are strong as well: flags and counters."""

    @property
    def key(self) -> Key:
        return self.agent, self.epoch, self.instruction.line


class Order:
    """Clocks of all agents of the cluster of a number. Agents are numbered by `agent`, by name."""

    def __init__(self, capacity: int, findings: Findings, number: int = 0) -> None:
        self.findings, self.number = findings, number
        self.names: list[str] = []
        self.clocks: list[Clock] = []
        self.accesses: list[Access] = []
        self.loads = 0
        self.useful: set[int] = set()
        """PTX lines of synchronisation by which some agent learned something before it did something."""
        self._fresh: dict[int, set[int]] = {}
        """Lines by which each agent learned what it has had no use for yet."""
        self._capacity = capacity
        self._numbers: dict[str, int] = {}
        self._last: dict[tuple[int, int, int], int] = {}

    def agent(self, name: str) -> int:
        """The number of an agent, new if its name is."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            assert number < self._capacity, "more agents than planned for"
            self.names.append(name)
            clock = Clock(self._capacity)
            clock.epochs[number] = 1
            self.clocks.append(clock)
        return number

    # --- what agents learn ----------------------------------------------------------------------------------

    def release(self, agent: int) -> Clock:
        """All that the agent did and knows so far, to be handed to others."""
        clock = self.clocks[agent]
        self._uses(agent)
        snapshot = clock.copy()
        clock.epochs[agent] += 1
        return snapshot

    def acquire(self, agent: int, clock: Clock, lines: Iterable[int] = ()) -> None:
        """Know what the clock says. `lines` are the PTX lines that brought this about: they are of use if it
        is news and the agent does something afterwards."""
        own = self.clocks[agent]
        if own.learns(clock):
            self.learns(agent, lines)
            own.join(clock)

    def hears(self, agent: int, told: Told, line: int) -> None:
        """Know what a strong write told, by the read or the fence on a PTX line."""
        if told.teach(self.clocks[agent], self.number):
            self.learns(agent, (*told.lines, line))

    def learns(self, agent: int, lines: Iterable[int]) -> None:
        """Instructions on these PTX lines taught the agent something."""
        self._fresh.setdefault(agent, set()).update(lines)

    def fence_proxy(self, agent: int) -> None:
        """fence.proxy.async: what the agent knows of generic writes is visible to asynchronous operations
        that it or its successors start."""
        clock = self.clocks[agent]
        clock.fence()
        clock.epochs[agent] += 1

    # --- accesses -------------------------------------------------------------------------------------------

    def warp_access(self, agent: int, instruction: Instruction, reduces: bool = False) -> int:
        """The number of what a warp does now with memory."""
        self._uses(agent)
        epoch = int(self.clocks[agent].epochs[agent])
        key = (agent, epoch, instruction.line)
        number = self._last.get(key)
        if number is None:
            strong = Strength.of(instruction.opcode).strong
            access = Access(agent, epoch, GENERIC, self.names[agent], instruction, -1, reduces, strong)
            number = self._last[key] = self.add(access)
        return number

    def queued(self, agent: int, queue: int, who: str, instruction: Instruction) -> int:
        """The number of what a warp has a queue of its own do; the same for all that it waits for at once."""
        self._uses(agent)
        epoch = int(self.clocks[queue].epochs[queue])
        key = (queue, epoch, instruction.line)
        number = self._last.get(key)
        if number is None:
            number = self._last[key] = self.add(Access(queue, epoch, ASYNC, who, instruction))
        return number

    def ended(self, agent: int, queue: int, line: int) -> None:
        """A warp learns, by the instruction on a PTX line, that all of its queue's actions are over."""
        own = self.clocks[queue].epochs
        self.clocks[agent].epochs[queue] = own[queue]
        own[queue] += 1
        self.learns(agent, (line,))

    def _uses(self, agent: int) -> None:
        if agent in self._fresh:
            self.useful |= self._fresh.pop(agent)

    def add(self, access: Access) -> int:
        self.accesses.append(access)
        return len(self.accesses) - 1

    def known(self, number: int, clock: Clock) -> bool:
        """True if whoever holds `clock` may rely on the access being over."""
        return over(self.accesses[number], clock)

    def visible(self, number: int, clock: Clock) -> bool:
        """True if a generic write has passed a proxy fence on its way to an asynchronous operation."""
        return passed(self.accesses[number], clock)

    def report(self, kind: str, text: str, now: int, before: int | None = None) -> None:
        """A finding about access `now`, and the earlier one it conflicts with."""
        current = self.accesses[now]
        earlier = None if before is None else self.accesses[before]
        whom = f"{current.who} {text}" + (f" (by {earlier.who})" if earlier else "")
        self.findings.add(Finding(kind, whom, current.instruction, earlier.instruction if earlier else None))


def over(access: Access, clock: Clock) -> bool:
    """True if whoever holds a clock of the access's cluster may rely on it being over."""
    if access.load >= 0:
        return bool(clock.loads >> access.load & 1)
    return bool(clock.epochs[access.agent] >= access.epoch) and not withheld(access, clock)


def withheld(access: Access, clock: Clock) -> bool:
    """True if all that a clock's holder lacks of an access is an order of the lanes of the warp that did it:
    another lane than those signalled."""
    return bool(clock.withheld) and access.key in clock.withheld


def passed(access: Access, clock: Clock) -> bool:
    """True if an access, if generic, has passed a proxy fence on its way to an asynchronous operation."""
    if access.proxy != GENERIC:
        return True
    if access.load >= 0:
        return bool(clock.fenced_loads >> access.load & 1)
    return bool(clock.fenced[access.agent] >= access.epoch)
