"""Configuration of the kernel of lengths, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.plan.lengths import Lengths

THREADS = 512
WARPS = THREADS // 32
BINS = 1024
"""Classes of work, most: each warp counts tiles of each."""


@dataclass(frozen=True)
class Config:
    """lengths   "packed" or "used"
    tile_m     queries of a tile, where tiles are to be sorted; else 0
    tile_n     keys of a tile, in which work is counted
    """

    lengths: Lengths
    tile_m: int = 0
    tile_n: int = 128
