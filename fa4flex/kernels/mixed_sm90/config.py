"""Configuration of the Hopper kernel for mixed batches, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.fwd_sm90 import config as forward

GROUPS = 2
"""Consumer warpgroups: both have the rows of a tile of few, and each has half of the keys of every tile."""

KEPT = 6
"""Numbers that a thread hands over of its two rows: maximum, shift and total of each."""


@dataclass(frozen=True)
class Config(forward.Config):
    """The forward kernel's: it is what tiles of many rows take."""

    few_rows: int = 64

    share: ClassVar[int | None] = None
    """Tiles of keys per split; None: there are none."""

    @property
    def half(self) -> int:
        """Keys of a tile that a warpgroup multiplies with few rows."""
        return self.tile_n // GROUPS
