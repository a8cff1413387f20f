"""Timing of asynchronous operations and turns of warps: the choices that hardware leaves open.

eager   every operation lands when it is issued; warps run as far as they can, in turns
late    an operation lands only when no warp can go on, and then one that a warp is waiting for; a warp that
signals
        lets all others go first; one warp, chosen by the seed, only runs when no other can
random  both are drawn from the seed

Of the clusters that have not started, a request cancels the first (eager), the last (late) or any; now and
then a random one is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from ptxsim.errors import InputError
from ptxsim.isa.table import Wait
from ptxsim.state.cta import Cluster, Warp
from ptxsim.state.operation import Operation, Units

TIMINGS = ("eager", "late", "random")
T = TypeVar("T")


class Timing:
    """`name` is one of TIMINGS."""

    def __init__(self, name: str, seed: int) -> None:
        if name not in TIMINGS:
            raise InputError(f"timing {name!r}", f"one of {', '.join(TIMINGS)}", "choose one of them")
        self.name, self.eager = name, name == "eager"
        self._random = random.Random(seed)
        self.starved = self._random.randrange(64) if name == "late" else None
        """Number, modulo 64, of the agent that only runs when no other can."""

    def next(self, ready: Sequence[Warp]) -> Warp:
        """Whose turn it is, of the warps that can run, the longest waiting first."""
        if self.name == "random":
            return self._random.choice(ready)
        if self.starved is not None and len(ready) > 1:
            others = [w for w in ready if w.agent % 64 != self.starved]
            return (others or ready)[0]
        return ready[0]

    def gives_way(self, signals: bool) -> bool:
        """True if a warp's turn ends after an instruction that others may be waiting for."""
        if self.name == "late":
            return signals
        return self.name == "random" and self._random.random() < 0.4

    def lands_now(self, units: Units) -> Operation | None:
        """An operation to land although warps could go on."""
        if self.name == "random" and units.pending and self._random.random() < 0.3:
            return self._random.choice(units.pending)
        return None

    def whose(self, clusters: Sequence[Cluster]) -> Cluster:
        """The cluster of which an operation lands when nobody can go on, the longest running first."""
        if len(clusters) == 1 or self.eager:
            return clusters[0]
        return self._random.choice(clusters) if self.name == "random" else clusters[-1]

    def forced(self, units: Units, waits: Sequence[Wait]) -> Operation:
        """Pending operation that lands when nobody can go on."""
        for wait in waits:
            wanted = units.signalling(wait.on)
            if wanted:
                return self._random.choice(wanted) if self.name == "random" else wanted[0]
        return units.pending[0]

    def cancels(self, waiting: int) -> int | None:
        """Index of the waiting cluster that a request cancels, or None: it is refused."""
        if self.name != "random":
            return 0 if self.eager else waiting - 1
        return None if self._random.random() < 0.1 else self._random.randrange(waiting)
