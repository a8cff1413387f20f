"""Configuration of the Hopper kernel for few query rows over an e4m3 cache, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.decode_sm90 import config as decode
from fa4flex.kernels.plan.lengths import Scaling

WARPS = 4
"""Consumer warps of a block."""

ROWS = 16
"""Query rows of a warp: the rows of one mma.sync."""

KEYS = 32
"""Keys that a warp multiplies at once."""

WEIGHT = 128.0
"""Factor of probabilities before they are rounded to float16. At most 2^8 where the maximum in use lags
behind, they stay below its largest number, 65504, and of the smaller ones those above 2^-21 keep all
digits."""


@dataclass(frozen=True)
class Config(decode.Config):
    """Configuration for 16-bit keys, and

    row_warps          sets of ROWS query rows, one for each warp or for several that share the keys of a tile
    k_scales, v_scales   granularity of the scales of keys and values
    """

    row_warps: int = 1
    k_scales: Scaling = ""
    v_scales: Scaling = ""

    kind: ClassVar[str] = "e4m3"

    @property
    def key_warps(self) -> int:
        """Warps that share the keys of a tile."""
        return WARPS // self.row_warps

    @property
    def query_bytes(self) -> int:
        """Bytes of shared memory for queries."""
        return query_bytes(self.row_warps, self.head_dim, self.head_dim_v)

    @property
    def shares_queries(self) -> bool:
        """True if queries are in shared memory rather than in registers."""
        return self.query_bytes > 0

    @property
    def steps(self) -> int:
        """Number of KEYS-key steps of a warp in a tile."""
        return self.tile_n // (KEYS * self.key_warps)


def query_bytes(row_warps: int, head_dim: int, head_dim_v: int) -> int:
    """Bytes of shared memory for queries of all warps: where outputs are wide, or one warp has several steps
    of a tile, there is no room for them in registers."""
    return 2 * WARPS * ROWS * head_dim if row_warps > 1 or max(head_dim, head_dim_v) > 128 else 0


def span(width: int) -> int:
    """Bytes of a row in one block of columns of a tile: its swizzle pattern."""
    return next(n for n in (128, 64, 32) if width % n == 0)
