"""Configuration of the Blackwell backward kernel of pairs, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.bwd_sm100 import config as base
from fa4flex.kernels.bwd_sm100.config import Registers, TensorMemory

__all__ = ["CTAS", "FRAGMENTS", "KEPT", "PACKED", "SPLIT", "Config", "Registers", "TensorMemory"]

CTAS = 2
"""Number of CTAs that multiply together."""

KEPT = base.ROWS // CTAS
"""Queries of a step whose dQ a CTA makes, of all keys of its pair."""

FRAGMENTS = base.ROWS // base.FRAGMENT
"""Number of fragments of a step's queries. Each compute warpgroup has every other one: of each CTA's queries,
half."""

PACKED = base.FRAGMENT // 2
"""Columns of a fragment's probabilities: those of a warpgroup lie next to each other, in the first half of
the scores, so that dQ may lie over the second. dS begin where their dP do."""

SPLIT = Registers(reduce=88, compute=168, other=88)


@dataclass(frozen=True)
class Config(base.Config):
    """Configuration of a pair of CTAs, as of one CTA alone; head_dim and head_dim_v are multiples of 64, as
    each CTA reads half of the columns of second operands. Tiles of Q and dO are there twice, by queries and
    by columns of a head, in rings of their own, which leaves room for one stage."""

    q_stages: int = 1
    registers: Registers = SPLIT

    @property
    def ctas(self) -> int:
        return CTAS
