"""Vector clocks: who knows of whose actions.

An agent does things in order: a warp, or a queue of asynchronous operations that complete in order. Its
actions are numbered by its epochs. A clock says, for every agent, up to which epoch its actions are known to
be over. TMA loads complete in any order, so each has a bit of its own.

Generic writes become visible to the asynchronous proxy only through a proxy fence (PTX ISA, "Proxies"):
`fenced` says up to which epoch an agent's writes have been passed through one, and `fenced_loads` which
asynchronous writes of the generic proxy (st.async).
"""

from __future__ import annotations

import numpy as np


class Clock:
    """`epochs` and `fenced` are int32 [agents], `loads` and `fenced_loads` sets of bits."""

    __slots__ = ("epochs", "fenced", "fenced_loads", "loads")

    def __init__(self, agents: int) -> None:
        self.epochs = np.zeros(agents, np.int32)
        self.fenced = np.zeros(agents, np.int32)
        self.loads = self.fenced_loads = 0

    def copy(self) -> Clock:
        new = Clock.__new__(Clock)
        new.epochs, new.fenced = self.epochs.copy(), self.fenced.copy()
        new.loads, new.fenced_loads = self.loads, self.fenced_loads
        return new

    def learns(self, other: Clock) -> bool:
        """Whether `other` knows anything that this clock does not."""
        return bool((other.epochs > self.epochs).any()) or bool(other.loads & ~self.loads)

    def join(self, other: Clock) -> None:
        """Know what `other` knows as well."""
        np.maximum(self.epochs, other.epochs, out=self.epochs)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        self.loads |= other.loads
        self.fenced_loads |= other.fenced_loads

    def fence(self) -> None:
        """Everything known becomes visible to the asynchronous proxy."""
        self.fenced[:] = self.epochs
        self.fenced_loads = self.loads
