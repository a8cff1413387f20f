"""Marks on granules of global memory: which access met each of them last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.shadow import distinct

PIECE = 1 << 18
"""Granules that are kept together."""
Granules = NDArray[np.int64]
"""Addresses divided by the granule."""


@dataclass(eq=False)
class Piece:
    """Number of the access of each granule, 0 where there is none; the first and the last one marked."""

    start: int
    number: NDArray[np.int32] = field(default_factory=lambda: np.zeros(PIECE, np.int32))
    low: int = PIECE
    high: int = -1

    def put(self, inside: Granules, number: int, low: int, high: int) -> None:
        self.number[inside] = number
        self.low, self.high = min(self.low, low), max(self.high, high)


class Marks:
    """`granule` is the bytes of global memory that are watched as one; numbers of accesses begin with 1."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.pieces: dict[int, Piece] = {}

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def near(self, low: int, stop: int) -> bool:
        """True if anything may be marked between two addresses."""
        first, last = low // self.granule, (stop - 1) // self.granule
        return any(p.start + p.low <= last and first <= p.start + p.high for p in self.pieces.values())

    def put(self, where: Granules, number: int) -> None:
        """Access `number` meets these granules."""
        for piece, which, low, high in self.split(where):
            piece.put(where[which] - piece.start, number, low, high)

    def met(self, where: Granules) -> Iterator[tuple[int, int]]:
        """Accesses that met any of these granules, and the first granule of each."""
        for index, which, _, _ in _pieces(where):
            piece = self.pieces.get(index)
            if piece is not None:
                inside = where[which] - piece.start
                for number, meet in marked(piece.number[inside]):
                    yield number, piece.start + int(inside[meet][0])

    def split(self, where: Granules) -> Iterator[tuple[Piece, slice | NDArray[np.bool_], int, int]]:
        """Pieces, new ones where there were none; which of the granules lie in each; its first and last."""
        for index, which, low, high in _pieces(where):
            piece = self.pieces.get(index) or self.pieces.setdefault(index, Piece(index * PIECE))
            yield piece, which, low, high

    def all(self) -> Granules:
        """All granules that are marked."""
        found = [piece.start + np.flatnonzero(piece.number) for piece in self.pieces.values()]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


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


def marked(found: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Different accesses, and which of the granules each met."""
    for before in distinct(found):
        if before:
            yield before, found == before
