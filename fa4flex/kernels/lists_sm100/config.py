"""Configuration of the Blackwell kernel for listed keys, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.decode_sm100 import config as base
from fa4flex.kernels.lists.config import ListsConfig
from fa4flex.kernels.lists_sm100.roles import WARPS


@dataclass(frozen=True)
class Config(ListsConfig, base.Config):  # type: ignore[override]  # packed queries are not split
    """Fields of the kernel for few query rows, whose lengths may be "packed" here, and

    gather_registers, softmax_registers   per thread, after the split
    beside        queries see sinks, a window or a tail beside their lists
    united        rows of the lists whose queries a tile has
    """

    gather_registers: int = 0
    softmax_registers: int = 0
    beside: bool = False
    united: int = 1

    threads: ClassVar[int] = 32 * WARPS

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return base.LANES // self.copies
