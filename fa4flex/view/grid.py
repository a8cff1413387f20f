"""A grid of tile classes as every picture draws it: coarsened, counted, and merged into rectangles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

EMPTY, PARTIAL, FULL = 0, 1, 2
CLASS_NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}


@dataclass(frozen=True)
class Rectangle:
    """Cells [top, bottom) x [left, right) of one class."""

    top: int
    bottom: int
    left: int
    right: int
    tile_class: int


@dataclass(frozen=True, eq=False)
class Grid:
    """Tile classes of one (batch, head).

    classes  uint8 [rows, columns]: 0 empty, 1 partial, 2 full
    tile     queries and keys that one cell stands for; the last row and column may hold fewer
    """

    classes: numpy.ndarray
    tile: tuple[int, int]
    q_len: int
    kv_len: int

    @property
    def rows(self) -> int:
        return int(self.classes.shape[0])

    @property
    def columns(self) -> int:
        return int(self.classes.shape[1])

    def coarsen(self, rows: int, columns: int) -> Grid:
        """At most `rows` x `columns` cells. A cell that covers tiles of different classes is partial."""
        by_row, by_column = -(-self.rows // rows), -(-self.columns // columns)
        if by_row <= 1 and by_column <= 1:
            return self
        lowest = _fold(numpy.minimum, self.classes, by_row, by_column)
        highest = _fold(numpy.maximum, self.classes, by_row, by_column)
        merged = numpy.where(lowest == highest, lowest, PARTIAL).astype(numpy.uint8)
        return Grid(merged, (self.tile[0] * by_row, self.tile[1] * by_column), self.q_len, self.kv_len)

    def counts(self) -> tuple[int, int, int]:
        """Cells that are (empty, partial, full)."""
        result = numpy.bincount(self.classes.ravel(), minlength=3)
        return int(result[EMPTY]), int(result[PARTIAL]), int(result[FULL])

    def queries(self, top: int, bottom: int) -> tuple[int, int]:
        """First and last query of the cell rows [top, bottom)."""
        return top * self.tile[0], min(bottom * self.tile[0], self.q_len) - 1

    def keys(self, left: int, right: int) -> tuple[int, int]:
        """First and last key of the cell columns [left, right)."""
        return left * self.tile[1], min(right * self.tile[1], self.kv_len) - 1

    def rectangles(self) -> Iterator[Rectangle]:
        """Every partial and full cell once: runs along a row, joined with equal runs in the rows below."""
        growing: dict[tuple[int, int, int], int] = {}  # (left, right, class) -> the row where it began
        for row in range(self.rows + 1):
            runs = set(_runs(self.classes[row])) if row < self.rows else set()
            for run in [run for run in growing if run not in runs]:
                yield Rectangle(growing.pop(run), row, *run)
            for run in runs:
                growing.setdefault(run, row)


def _fold(how: numpy.ufunc, classes: numpy.ndarray, by_row: int, by_column: int) -> numpy.ndarray:
    folded = how.reduceat(classes, numpy.arange(0, classes.shape[0], by_row), axis=0)
    return how.reduceat(folded, numpy.arange(0, classes.shape[1], by_column), axis=1)


def _runs(cells: numpy.ndarray) -> Iterator[tuple[int, int, int]]:
    """(left, right, class) of each maximal run of equal cells that is not empty."""
    edges = numpy.flatnonzero(numpy.diff(cells)) + 1
    for left, right in zip([0, *edges.tolist()], [*edges.tolist(), len(cells)]):
        if cells[left] != EMPTY:
            yield left, right, int(cells[left])
