"""Configuration of the Hopper kernel for listed latent rows, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.lists.config import ROWS
from fa4flex.kernels.mla_decode_sm90 import config as base
from fa4flex.kernels.mla_decode_sm90.config import BLOCK

GATHER_WARPS = 4
"""Warps that gather rows."""


@dataclass(frozen=True)
class Config(base.Config):
    """Fields of the kernel for latent rows, whose lengths may be "packed" here, and

    beside    queries see sinks, a window or a tail beside their lists
    """

    beside: bool = False

    clears: ClassVar[bool] = False  # rows that are not there are zeros
    rows: ClassVar[int] = ROWS
    """Rows of a tile."""
    united: ClassVar[int] = 1
    """Rows of the lists whose queries a tile has."""
    told: ClassVar[int] = 1
    """Numbers that consumers are told of a key of a tile."""
    kv_stages: ClassVar[int] = 1
    """Tiles of keys in flight."""
    gather_warps: ClassVar[int] = GATHER_WARPS
    height: ClassVar[int] = BLOCK // GATHER_WARPS
    """Keys of a block that a warp gathers."""

    @property
    def splits(self) -> bool:  # type: ignore[override]  # packed queries are not split
        """True if several blocks may share the keys of a tile."""
        return self.lengths != "packed"
