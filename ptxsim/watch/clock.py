"""Vector clocks: who knows of whose actions.

An agent does things in order: a warp, or a queue of asynchronous operations that complete in order. Its
actions are numbered by its epochs. A clock says, for every agent, up to which epoch its actions are known to
be over. TMA loads complete in any order, so each has a bit of its own.

Generic writes become visible to the asynchronous proxy only through a proxy fence (PTX ISA, "Proxies"):
`fenced` says up to which epoch an agent's writes have been passed through one, and `fenced_loads` which
asynchronous writes of the generic proxy (st.async).

Agents belong to a cluster. What is known of other clusters' agents, through flags in global memory, is a
clock for each of them: `others`, which nobody changes once it is made.

A lane that signals alone says nothing of what other lanes of its warp did since something ordered them:
those accesses are `withheld`, although their epoch is known.
"""

from __future__ import annotations

import numpy as np


class Clock:
    """`epochs` and `fenced` are int32 [agents], `loads` and `fenced_loads` sets of bits, `others` clocks by
    the number of their cluster, `withheld` (agent, epoch, PTX line) of accesses."""

    __slots__ = ("epochs", "fenced", "fenced_loads", "loads", "others", "withheld")

    def __init__(self, agents: int) -> None:
        self.epochs = np.zeros(agents, np.int32)
        self.fenced = np.zeros(agents, np.int32)
        self.loads = self.fenced_loads = 0
        self.others: dict[int, Clock] = NO_OTHERS
        self.withheld: frozenset[Key] = NOTHING

    def copy(self) -> Clock:
        new = Clock.__new__(Clock)
        new.epochs, new.fenced = self.epochs.copy(), self.fenced.copy()
        new.loads, new.fenced_loads, new.others = self.loads, self.fenced_loads, self.others
        new.withheld = self.withheld
        return new

    def covers(self, key: Key) -> bool:
        """True if an access, by its agent, epoch and PTX line, is known to be over."""
        return bool(self.epochs[key[0]] >= key[1]) and key not in self.withheld

    def learns(self, other: Clock) -> bool:
        """True if `other` knows anything that this clock does not."""
        if (other.epochs > self.epochs).any() or other.loads & ~self.loads:
            return True
        if self.withheld and any(other.covers(key) for key in self.withheld):
            return True
        return other.others is not self.others and any(
            number not in self.others or self.others[number].learns(clock)
            for number, clock in other.others.items()
        )

    def join(self, other: Clock) -> None:
        """Know what `other` knows as well."""
        if self.withheld or other.withheld:
            self.withheld = frozenset(
                key
                for mine, theirs in ((self, other), (other, self))
                for key in mine.withheld
                if not theirs.covers(key)
            )
        np.maximum(self.epochs, other.epochs, out=self.epochs)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        self.loads |= other.loads
        self.fenced_loads |= other.fenced_loads
        if other.others is not self.others:
            for number, clock in other.others.items():
                self.join_other(number, clock)

    def join_other(self, number: int, clock: Clock) -> None:
        """Know what is known in another cluster."""
        if number in self.others:
            clock = clock.copy()
            clock.join(self.others[number])
        self.others = {**self.others, number: clock}

    def fence(self) -> None:
        """Everything known becomes visible to the asynchronous proxy."""
        self.fenced[:] = self.epochs
        self.fenced_loads = self.loads
        if self.others:
            self.others = {number: clock.copy() for number, clock in self.others.items()}
            for clock in self.others.values():
                clock.fence()


Key = tuple[int, int, int]
NOTHING: frozenset[Key] = frozenset()
NO_OTHERS: dict[int, Clock] = {}
