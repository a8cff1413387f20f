"""Configuration of the kernel that multiplies queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

WARPS = 4
ROWS, KEYS = 16, 16
"""Rows of one product of the tensor core, and keys of two."""

PIECE = 8
"""Channels that a thread reads at once: 16 bytes."""

DEEP = 32
"""Channels of a row that the threads of a quad read at once, and that two products take."""

WIDEST = 256
"""Channels, at most: a thread keeps those of its rows in registers."""


@dataclass(frozen=True)
class Config:
    """dtype  of queries and keys, of 16 bits
    width  channels, a multiple of PIECE
    even   rows of scores begin at multiples of 16 bytes
    """

    dtype: str
    width: int
    even: bool

    together: ClassVar[int] = PIECE

    @property
    def tall(self) -> int:
        """Products next to each other that a warp has rows for: 128 registers of a thread, at most."""
        return 2 if self.width <= WIDEST // 2 else 1

    @property
    def rows(self) -> int:
        """Rows of a block of threads."""
        return WARPS * self.tall * ROWS

    @property
    def depth(self) -> int:
        """Times that DEEP channels are read; those past the width are 0."""
        return -(-self.width // DEEP)
