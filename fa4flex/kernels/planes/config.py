"""Configuration of the kernel that bounds masses of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

GROUP = 8
"""Rows of a tensor core's product: each takes two of its 16, one for each half of a query's digits."""

MOST_GROUPS = 2
"""Groups of rows whose scores of a tile a warp has in registers."""

RUN = 64
"""Channels that four lanes read at once: 16 bytes each. Widths are multiples of it."""

WIDEST = 256

LOW = 254.0
"""Steps of the low half of a query's digits in one of the high half."""


ULPS = 2.0**-22
"""Error of a float32 sum of products, for each of its terms, relative to the product of the norms."""

SLACK = 1 + 2.0**-12
"""Factor by which float32 norms, exponentials and sums of a tile may be too small."""


EVERY = 32
"""Steps after which a head whose plane has not been worth its bytes looks at it again."""

BITS = 29, 12
"""Bits of a float32 that a threshold is found of, from the highest: numbers below 2, to 11 bits."""

LEFT, READ = 1, 2
"""Classes of visited tiles: by their plane alone, and with 16 bits."""

TILES = 256, 1024, 4096, 16384
"""Tiles of a sequence that kernels have memory for."""


LARGEST = 127.0
"""Greatest code."""


@dataclass(frozen=True)
class QueriesConfig:
    """dtype   of queries, of 16 bits
    width   of queries and keys
    groups  of rows, as of Config
    """

    dtype: str
    width: int
    groups: int

    together: ClassVar[int] = 8


@dataclass(frozen=True)
class ChooseConfig:
    """tiles   of a sequence, at most
    block   keys of a tile
    groups  of rows, as of Config
    """

    tiles: int
    block: int
    groups: int


@dataclass(frozen=True)
class Config:
    """width   of queries and keys
    block   keys of a tile
    groups  groups of rows: queries times the heads that share a head of keys, filled up
    """

    width: int
    block: int
    groups: int

    warps: ClassVar[int] = 4

    @property
    def runs(self) -> int:
        return self.width // RUN
