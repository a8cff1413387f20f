"""Configuration of the kernel that pools blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

How = Literal["mean", "sum", "max", "min"]

PIECE = 8
"""Channels of a thread: 16 bytes."""

AHEAD = 4
"""Tokens of a thread that it has asked for before it looks at the first."""

THREADS = 256

WIDEST = PIECE * THREADS
"""Channels of a token, at most."""

LONGEST = 4096
"""Tokens of a block, at most: a few blocks of more would leave most of a GPU idle."""


@dataclass(frozen=True)
class Config:
    """dtype  of tokens and rows, of 16 bits
    width  channels of a token, a multiple of PIECE
    how    what is made of a block
    share  threads, a power of two, that share the tokens of a block for the same channels
    """

    dtype: str
    width: int
    how: How
    share: int

    together: ClassVar[int] = PIECE

    @property
    def lanes(self) -> int:
        """Threads next to each other that have a token, a power of two."""
        return across(self.width)

    @property
    def rows(self) -> int:
        """Rows that a block of threads makes."""
        return THREADS // (self.lanes * self.share)


def across(width: int) -> int:
    """Threads that have a token of so many channels: a power of two."""
    return 1 << (-(-width // PIECE) - 1).bit_length()


def share_of(width: int, block: int) -> int:
    """Threads that share blocks of so many tokens: each has AHEAD of them or more, where there are."""
    most = THREADS // across(width)
    return min(1 << max(block // AHEAD, 1).bit_length() - 1, most)
