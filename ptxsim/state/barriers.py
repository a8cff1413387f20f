"""Barriers as state: mbarriers in shared memory, named barriers of a CTA, the barrier of a cluster."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from ptxsim.state.registers import LANES
from ptxsim.watch.clock import Clock


class Misuse(Exception):
    """A barrier used in a way that the PTX ISA leaves undefined."""


class MBarrier:
    """An mbarrier object (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

    A phase completes when `pending` arrivals and `bytes` of transactions are both zero. `gathered` is what
    those who arrived in this phase knew, `passed` what those of the phase before did: a waiter learns that.
    `made` is the number of the access that initialised it, `users` the agents that are known to know of it;
    `announced` says that fence.mbarrier_init followed.
    """

    def __init__(self, cta: int, offset: int, count: int, agents: int, made: int) -> None:
        self.cta, self.offset, self.count, self.made = cta, offset, count, made
        self.users: set[int] = set()
        self.announced = False
        self.pending, self.bytes, self.phase = count, 0, 0
        self.gathered, self.passed = Clock(agents), Clock(agents)
        self.lines: set[int] = set()
        self.passed_lines: set[int] = set()
        """PTX lines that took part in this phase, and in the one before."""

    def arrive(self, count: int, clock: Clock, line: int) -> None:
        if count > self.pending:
            raise Misuse(f"{count} arrivals where {self.pending} of {self.count} are expected")
        self.gathered.join(clock)
        self.lines.add(line)
        self.pending -= count
        self._complete()

    def expect(self, count: int, line: int) -> None:
        """Add to the bytes awaited, before arriving."""
        self.lines.add(line)
        self.bytes += count

    def deliver(self, count: int) -> None:
        """Bytes of a transaction have arrived; this may happen before they are expected."""
        self.bytes -= count
        self._complete()

    def learn(self, load: int) -> None:
        """Waiters of this phase will know that this TMA load is over."""
        self.gathered.loads |= 1 << load

    def over(self, parity: int) -> bool:
        """True if the phase of this parity has completed: at once for the one before the first."""
        return self.phase & 1 != parity & 1

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.passed, self.gathered = self.gathered, Clock(len(self.gathered.epochs))
            self.passed_lines, self.lines = self.lines, set()

    @property
    def place(self) -> str:
        return f"the mbarrier at {self.offset:#x} of CTA {self.cta}"

    def __str__(self) -> str:
        waits = f"{self.pending} of {self.count} arrivals"
        data = f" and {self.bytes} bytes" if self.bytes else ""
        return f"{self.place}, phase {self.phase}, which awaits {waits}{data}"


@dataclass
class Round:
    """One completion of a barrier: what those knew who came, and who comes takes away to wait for it."""

    number: int
    gathered: Clock
    lines: set[int] = field(default_factory=set)
    """PTX lines by which threads came."""
    announced: set[MBarrier] = field(default_factory=set)
    """mbarriers whose initialisation relaxed arrivals hand on, by a fence.mbarrier_init."""
    asked: int = 0
    true: int = 0
    """Threads that came with a predicate to be reduced, and those of them for which it holds."""

    def follows(self, before: Round) -> None:
        """Hand on what the round before did too: some came to this one without a wait for that one."""
        self.gathered.join(before.gathered)
        self.lines |= before.lines
        self.announced |= before.announced


@dataclass
class Meeting:
    """A barrier that a number of threads come to: bar.sync and bar.arrive of a CTA, or a cluster's.

    `threads` is how many make it complete; `round` is the one that they come to now.
    """

    name: str
    agents: int
    whole: bool = False
    """True if this round needs everybody who has not exited."""
    threads: int = 0
    here: int = 0
    round: Round = field(init=False)
    came: dict[int, str] = field(default_factory=dict)
    """Names of the warps that came, by their agents."""

    def __post_init__(self) -> None:
        self.round = Round(0, Clock(self.agents))

    def come(self, agent: int, who: str, expected: int, clock: Clock, line: int) -> None:
        """A warp comes to a barrier for an expected number of threads."""
        self._agrees(who, expected)
        if self.here + LANES > expected:
            raise Misuse(f"{who} makes {self.here + LANES} threads where {expected} are expected")
        self._adds(agent, who, expected, clock, line)
        if self.here == expected:
            self.finish()

    def come_whole(self, agent: int, who: str, living: Set[int], clock: Clock, line: int) -> None:
        """A warp comes to a barrier for all who have not exited: the agents `living`."""
        expected = LANES * len(living | self.came.keys())
        if not self.whole:
            self._agrees(who, expected)
        self.whole = True
        self._adds(agent, who, expected, clock, line)
        self.look(living)

    def look(self, living: Set[int]) -> None:
        """Finish where all have come who have not exited."""
        if self.here and self.whole and living <= self.came.keys():
            self.finish()

    def _agrees(self, who: str, expected: int) -> None:
        if self.here and expected != self.threads:
            others = ", ".join(self.came.values())
            raise Misuse(f"{who} expects {expected} threads, {others} expected {self.threads}")

    def _adds(self, agent: int, who: str, expected: int, clock: Clock, line: int) -> None:
        self.threads = expected
        self.round.gathered.join(clock)
        self.round.lines.add(line)
        self.here += LANES
        self.came[agent] = who

    def finish(self) -> None:
        self.round = Round(self.round.number + 1, Clock(self.agents))
        self.here, self.whole = 0, False
        self.came.clear()

    def __str__(self) -> str:
        who = ", ".join(self.came.values()) or "none"
        return f"{self.name}: {self.here} of {self.threads} threads came ({who})"
