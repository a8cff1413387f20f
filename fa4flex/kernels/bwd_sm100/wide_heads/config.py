"""Configuration of the Blackwell backward kernel of wide heads, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.bwd_sm100 import config as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, HALF, ROWS, Registers, TensorMemory

__all__ = ["EARLY", "FRAGMENTS", "PACKED", "SLOPED", "SPLIT", "TURNS", "Config", "Registers", "TensorMemory"]

FRAGMENTS = HALF // FRAGMENT
"""Number of fragments of queries that a compute warpgroup has of a step: every other one, the second one HALF
behind the first."""

PACKED = FRAGMENT // 2
"""Columns of a fragment's probabilities: they all lie next to each other, in the first half of the scores, so
that dP may lie over the second. dS begin where their dP do."""

TURNS = ROWS + HALF
"""Columns, the last ones, in which scores, dP and dQ take turns beside dV and dK: dQ is no wider."""

EARLY = ROWS
"""Columns of dQ that the next scores lie over."""

SPLIT = Registers(reduce=96, compute=160, other=96)

SLOPED = Registers(reduce=88, compute=168, other=88)
"""Registers where scores have slopes of their own, which wait in registers for dP."""


@dataclass(frozen=True)
class Config(base.Config):
    """head_dim is at most TURNS, and head_dim_v at most 128. Shared memory holds one tile of Q."""

    q_stages: int = 1
    registers: Registers = SPLIT
