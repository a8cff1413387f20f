"""Configuration of the kernels that select the k largest scores of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.sequences.config import THREADS

SHORT = 1024
"""Units of the rows that a warp has, at most: 32 for each lane."""

MOST_UNITS = 1 << 20
"""Units of a row, at most: those that are selected have a bit each in shared memory."""

MOST_SELECTED = 2048
"""Units that are selected of a long row, at most."""

HELD = 8192
"""Units whose keys and numbers shared memory has room for. Of rows that have more, those are held that are at
least as large as a sample says; where these are too many or too few, the row is read again and again."""

SAMPLE = 8192
"""Units of a sample, spread evenly over the row."""


@dataclass(frozen=True)
class ShortConfig:
    """each  units of a lane
    forced  some units are selected whatever their scores are
    """

    each: int
    forced: bool = False

    threads: ClassVar[int] = 128
    together: ClassVar[int] = 1
    dtype: ClassVar[str] = "float32"


@dataclass(frozen=True)
class LongConfig:
    """units     of a row, at most: a multiple of 32
    together  scores that a thread reads at once
    forced    some units are selected whatever their scores are
    """

    units: int
    together: int = 4
    forced: bool = False

    threads: ClassVar[int] = THREADS
    dtype: ClassVar[str] = "float32"
