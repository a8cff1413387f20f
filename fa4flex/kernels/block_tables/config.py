"""Configuration of the kernels of block tables."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.plan.lengths import Lengths

THREADS = 128
WARPS = THREADS // 32
PIECE = 128
"""Elements of a captured tensor that a warp compares with the ones behind them."""

PART = 256
"""Words of 4 bytes of a tensor whose digest is kept: what a warp reads at once."""


@dataclass(frozen=True)
class Range:
    """An integer whose least and greatest value over each tile are found first: the index that it depends on,
    "q" or "kv", and whether it differs by batch entry and by head."""

    index: str
    by_batch: bool
    by_heads: bool


@dataclass(frozen=True)
class Config:
    """tile     queries and keys of a tile
    by_keys  rows of the tables are tiles of keys, which list tiles of queries; else the other way round
    lengths  "dense", or sequences have their own
    varies   whether tables differ by batch entry or sequence, and by head; strides along what they do not
             differ by are 0
    ranges   what is found first
    spans    key spans per row whose ends are written as well, 0 for none
    searched slots of the captured tensors that have to be sorted for that
    ordered  both kinds of tiles stand in one list, with the turn of each: see Turns
    read     slots of the captured tensors that tables are made of
    """

    tile: tuple[int, int]
    by_keys: bool
    lengths: Lengths = "dense"
    varies: tuple[bool, bool] = (True, True)
    ranges: tuple[Range, ...] = ()
    spans: int = 0
    searched: tuple[int, ...] = ()
    ordered: bool = False
    read: tuple[int, ...] = ()
