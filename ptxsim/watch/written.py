"""Writes of a launch to global memory: who wrote each piece last, and who meets that without an order.

Reads are compared with the writes before them and not remembered themselves: a write that comes too early
after a read is not found. Two writes that nothing orders are a race if they leave different values. CTAs of
different clusters are ordered by flags in global memory alone (flags.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.clock import Clock
from ptxsim.watch.findings import Finding, Findings
from ptxsim.watch.order import ASYNC, Access, Order, over, passed
from ptxsim.watch.shadow import distinct

PIECE = 1 << 18
"""Granules that are kept together."""
Granules = NDArray[np.int64]
"""Addresses divided by the granule."""
Changed = Callable[[], NDArray[np.bool_]]
"""Mask of the granules written that get another value."""


@dataclass(eq=False)
class Piece:
    """Number of the last write of each granule, 0 where there is none; the first and the last one written."""

    start: int
    writer: NDArray[np.int32] = field(default_factory=lambda: np.zeros(PIECE, np.int32))
    low: int = PIECE
    high: int = -1


class Written:
    """`granule` is the bytes of global memory that are watched as one."""

    def __init__(self, granule: int, findings: Findings) -> None:
        self.granule, self._findings = granule, findings
        self._pieces: dict[int, Piece] = {}
        self._writes: list[tuple[int, Access]] = []
        """(cluster, access) by number, from 1 on."""
        self._numbers: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def near(self, low: int, stop: int) -> bool:
        """True if anything may have been written between two addresses."""
        first, last = low // self.granule, (stop - 1) // self.granule
        return any(p.start + p.low <= last and first <= p.start + p.high for p in self._pieces.values())

    def read(self, order: Order, number: int, where: Granules, clock: Clock) -> None:
        """Access `number` of a cluster reads; `clock` is what its agent knew when it began."""
        for index, which, _, _ in _pieces(where):
            piece = self._pieces.get(index)
            if piece is None:
                continue
            inside = where[which] - piece.start
            for before, meet in _writers(piece.writer[inside]):
                wrong = self._wrong(order, number, before, clock)
                if wrong:
                    self._report(order, number, before, wrong, "reads", piece.start + int(inside[meet][0]))

    def write(self, order: Order, number: int, where: Granules, clock: Clock, changed: Changed) -> None:
        """Access `number` of a cluster writes."""
        mine = self._numbers.get((order.number, number)) or self._number(order, number)
        for index, which, low, high in _pieces(where):
            piece = self._pieces.get(index) or self._pieces.setdefault(index, Piece(index * PIECE))
            inside = where[which] - piece.start
            for before, meet in _writers(piece.writer[inside]):
                wrong = self._wrong(order, number, before, clock)
                if wrong == "race":
                    meet &= changed()[which]
                if wrong and meet.any():
                    self._report(
                        order, number, before, wrong, "overwrites", piece.start + int(inside[meet][0])
                    )
            piece.writer[inside] = mine
            piece.low, piece.high = min(piece.low, low), max(piece.high, high)

    def _wrong(self, order: Order, number: int, before: int, clock: Clock) -> str:
        """The kind of finding that an access makes after a write, or ""."""
        access, (cluster, earlier) = order.accesses[number], self._writes[before - 1]
        known: Clock | None = clock
        if cluster != order.number:
            known = clock.others.get(cluster)
        elif earlier.agent == access.agent and access.load < 0:
            return ""
        if known is None or not over(earlier, known):
            agree = (access.strong and earlier.strong) or (access.reduces and earlier.reduces)
            return "" if agree else "race"
        return "missing proxy fence" if access.proxy == ASYNC and not passed(earlier, known) else ""

    def _report(self, order: Order, number: int, before: int, kind: str, does: str, granule: int) -> None:
        access, (cluster, earlier) = order.accesses[number], self._writes[before - 1]
        how = "too early" if kind == "race" else "generic writes"
        whose = earlier.who if cluster == order.number else f"{earlier.who} of cluster {cluster}"
        place = f"global memory at {granule * self.granule:#x}"
        text = f"{access.who} {does} {how} in {place} (by {whose})"
        self._findings.add(Finding(kind, text, access.instruction, earlier.instruction))

    def _number(self, order: Order, number: int) -> int:
        self._writes.append((order.number, order.accesses[number]))
        self._numbers[order.number, number] = len(self._writes)
        return len(self._writes)


def _pieces(where: Granules) -> Iterator[tuple[int, slice | NDArray[np.bool_], int, int]]:
    """Numbers of the pieces that granules lie in, which of them do, and the first and last place there."""
    low, high = int(where.min()), int(where.max())
    first, last = low // PIECE, high // PIECE
    if first == last:
        yield first, slice(None), low % PIECE, high % PIECE
        return
    numbers = where // PIECE
    for number in np.unique(numbers).tolist():
        yield (
            number,
            numbers == number,
            low % PIECE if number == first else 0,
            high % PIECE if number == last else PIECE - 1,
        )


def _writers(found: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Different writes, and which of the granules each wrote."""
    for before in distinct(found):
        if before:
            yield before, found == before
