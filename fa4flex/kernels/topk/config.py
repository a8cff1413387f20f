"""Configuration of the kernels that select the k largest scores of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.sequences.config import THREADS

SHORT = 1024
"""Units of the rows that a warp has, at most: 32 for each lane."""

FEW = 12
"""Units that are selected of a short row by one maximum after the other, at most. A maximum takes about twice
as long as one of the 32 bits of a key."""

MOST_UNITS = 1 << 20
"""Units of a row, at most: those that are selected have a bit each in shared memory."""

MOST_SELECTED = 2048
"""Units that are selected of a long row, at most."""


@dataclass(frozen=True)
class ShortConfig:
    """each  units of a lane
    ruled  some units may not be selected, or are whatever their scores are
    """

    each: int
    ruled: bool = False

    threads: ClassVar[int] = 128
    together: ClassVar[int] = 1
    dtype: ClassVar[str] = "float32"


@dataclass(frozen=True)
class LongConfig:
    """units     of a row, at most: a multiple of 32
    held      units whose keys and numbers shared memory has room for: of rows that have more, those that are
              larger than a sample says
    sample    units of a sample, at most as many, spread evenly over the row
    together  scores that a thread reads at once
    ruled     some units may not be selected, or are whatever their scores are
    """

    units: int
    held: int
    sample: int
    together: int = 4
    ruled: bool = False

    threads: ClassVar[int] = THREADS
    dtype: ClassVar[str] = "float32"
