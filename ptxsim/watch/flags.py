"""Synchronisation by strong writes: fences, flags and counters by which threads wait for each other (PTX ISA,
"Memory Consistency Model": "Release and Acquire Patterns").

A release pattern is a releasing write, or a fence and then a strong write; an acquire pattern is an acquiring
read, or a strong read and then a fence. Reading what a release pattern wrote synchronises: the reader knows
what the writer knew. Weak reads and writes do not; scopes are not looked at.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from ptxsim.watch.clock import Clock, Key

STRONG = frozenset(("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"))
UPDATES = frozenset(("atom", "red"))


@dataclass(frozen=True)
class Strength:
    """Memory ordering of an access."""

    strong: bool
    releases: bool
    acquires: bool

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, opcode: str) -> Strength:
        """Updates are relaxed unless they say otherwise."""
        name, *modifiers = opcode.split(".")
        given = STRONG.intersection(modifiers)
        both, updates = "acq_rel" in given, name in UPDATES
        return cls(bool(given) or updates, both or "release" in given, both or "acquire" in given)


@dataclass(frozen=True)
class Told:
    """Clocks by the number of their cluster, and the PTX lines that made them known."""

    clocks: dict[int, Clock]
    lines: frozenset[int]

    @classmethod
    def by(cls, clock: Clock, cluster: int, line: int) -> Told:
        """All that a clock of a cluster says."""
        own = clock.copy()
        own.others = {}
        return cls({**clock.others, cluster: own}, frozenset((line,)))

    def but(self, withheld: frozenset[Key], cluster: int) -> Told:
        """All of it but some accesses of a cluster."""
        if not withheld:
            return self
        own = self.clocks[cluster].copy()
        own.withheld |= withheld
        return Told({**self.clocks, cluster: own}, self.lines)

    def teach(self, pupil: Clock, cluster: int) -> bool:
        """Make a clock of a cluster know all this; whether any of it was news."""
        news = False
        for number, clock in self.clocks.items():
            if number == cluster:
                if pupil.learns(clock):
                    pupil.join(clock)
                    news = True
            elif number not in pupil.others or pupil.others[number].learns(clock):
                pupil.join_other(number, clock)
                news = True
        return news

    def joined(self, other: Told) -> Told:
        clocks = dict(self.clocks)
        for number, clock in other.clocks.items():
            known = clocks.get(number)
            if known is not None:
                clock = clock.copy()
                clock.join(known)
            clocks[number] = clock
        return Told(clocks, self.lines | other.lines)


class Flags:
    """Knowledge to be had by reading an address, until something else is written there."""

    def __init__(self) -> None:
        self._told: dict[Hashable, Told] = {}

    def write(self, key: Hashable, told: Told | None, updates: bool) -> None:
        """A strong write, by one who tells this. Updates keep what those before them told."""
        before = self._told.get(key) if updates else None
        if told is None:
            if before is None:
                self._told.pop(key, None)
        else:
            self._told[key] = told if before is None else before.joined(told)

    def read(self, key: Hashable) -> Told | None:
        return self._told.get(key)

    def __bool__(self) -> bool:
        return bool(self._told)
