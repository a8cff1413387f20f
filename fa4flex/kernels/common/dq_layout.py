"""Order of a tile's numbers where they are summed up, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Order:
    """Number n of a tile has a digit per entry of `shape`, the fastest first: n % shape[0], then
    n // shape[0] % shape[1], and so on. It lies in row sum(digit * rows) and column sum(digit * columns)."""

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def place(self, number: Any) -> tuple[Any, Any]:
        """(row, column), of an int or of a number that is known when the kernel runs."""
        row: Any = 0
        column: Any = 0
        for extent, down, across in zip(self.shape, self.rows, self.columns, strict=True):
            digit = number % extent
            number = number // extent
            row, column = row + digit * down, column + digit * across
        return row, column
