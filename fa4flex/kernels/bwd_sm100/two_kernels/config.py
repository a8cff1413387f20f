"""Configuration of the two Blackwell backward kernels of heads up to 256, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.bwd_sm100 import config as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS, Registers, TensorMemory
from fa4flex.kernels.common.dq_layout import Order

__all__ = ["SPLIT", "STEP", "VALUES", "Config", "Registers", "TensorMemory", "ValuesConfig"]

STEP = 64
"""Queries of a step: scores, dP and dQ of so many are all that tensor memory has room for beside dK and
values."""

HALF = STEP // 2
"""Queries of a step that one of the two compute warpgroups takes, of all keys."""

PACKED = HALF // 2
"""Columns of them in 16 bits."""

SCORE_STAGES = 2
"""Places for scores in tensor memory, of the kernel for dV."""

TAKEN = 16
"""Columns of 32 bits that a thread moves between registers and tensor memory at a time, of keys or values."""

SPLIT = Registers(reduce=96, compute=160, other=96)

VALUES = Registers(reduce=72, compute=168, other=104)
"""Registers of the kernel for dV, whose first warpgroup has nothing to do."""


@dataclass(frozen=True)
class Config(base.Config):
    """Configuration of the kernel for dK and dQ; `values` is that of the one for dV. `held`: first column of
    the block's values."""

    q_stages: int = 2
    do_stages: int = 2
    dq_stages: int = 0
    registers: Registers = SPLIT
    held: int = 0

    @property
    def tile_m(self) -> int:
        return STEP

    @property
    def held_width(self) -> int:
        """Elements of a row of what the block holds in tensor memory."""
        return self.head_dim_v

    @property
    def turn_rows(self) -> int:
        return STEP // self.dq_parts

    @property
    def dq_order(self) -> Order:
        """Each warp has 32 columns of either half of a head, a column per lane, and writes four queries at a
        time."""
        queries, halves = STEP // 4, self.head_dim // ROWS
        rows, columns = (1, 0, 4, 0, 0), (0, 1, 0, ROWS, FRAGMENT)
        return Order((4, 32, queries, halves, ROWS // FRAGMENT), rows=rows, columns=columns)

    @property
    def values(self) -> ValuesConfig:
        return ValuesConfig(
            self.head_dim,
            self.head_dim_v,
            self.depths,
            value_memory(self.head_dim_v, self.head_dim),
            masked=self.masked,
            lengths=self.lengths,
            deterministic=self.deterministic,
            held=self.head_dim_v,
        )


@dataclass(frozen=True)
class ValuesConfig(base.Config):
    """Configuration of the kernel for dV. Scores of a stage lie `score_columns` behind those of the one
    before. `held`: first column of the block's keys."""

    q_stages: int = SCORE_STAGES
    do_stages: int = 3
    dq_stages: int = 0
    registers: Registers = VALUES
    held: int = 0

    score_columns = STEP

    @property
    def tile_m(self) -> int:
        return STEP

    @property
    def held_width(self) -> int:
        return self.head_dim


def value_memory(head_dim_v: int, head_dim: int) -> TensorMemory:
    """Columns of the kernel for dV: dV, the keys, and scores, over each half of which its probabilities
    lie."""
    scores = head_dim_v + head_dim // 2
    return TensorMemory(scores, (scores, scores + HALF), dv=0, dprob=0, ds=(0, 0), dk=0, dq=0)
