"""Configuration of the Hopper backward kernel for listed keys, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.common.dq_layout import Order
from fa4flex.kernels.lists.config import ROWS
from fa4flex.kernels.lists_sm90 import config as lists

KEYS = 64
"""Keys of a tile: rows of one product for dK or dV."""

TOGETHER = 16
"""Columns of a sum of which four lanes have four numbers each, in one order."""


@dataclass(frozen=True)
class Config(lists.Config):
    """Configuration of the forward kernel, and besides

    v_stages      tiles of V in flight, of which each is free once its product is done
    """

    v_stages: int = 1

    tile_m: ClassVar[int] = ROWS
    stores_dq: ClassVar[bool] = True
    clears: ClassVar[bool] = False
    persistent: ClassVar[bool] = False

    @property
    def splits(self) -> bool:
        """False: a block has all keys of its tile."""
        return False


@dataclass(frozen=True)
class SumsConfig:
    """Sums of dK or dV as the kernel after this one reads them: `tile_m` keys of `head_dim` columns a time.
    columns: None, as all of them are there, also those that pad a head."""

    head_dim: int
    tile_m: int = KEYS
    columns: None = None

    @property
    def dq_order(self) -> Order:
        """Rows one after the other; of each 16 columns, a lane of four has those from 2 l on and from
        8 + 2 l on, side by side."""
        shape = (2, 2, 4, self.head_dim // TOGETHER, self.tile_m)
        return Order(shape, rows=(0, 0, 0, 0, 1), columns=(1, 8, 2, TOGETHER, 0))
