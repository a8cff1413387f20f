"""The warps that bring queries and output gradients with their rows' numbers; for dK and dQ, before them the
block's keys, and the second half of its values. What products have as their first operand in tensor memory,
compute threads bring."""

from __future__ import annotations

from typing import Any, NamedTuple

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.two_kernels.roles import LOADS, VALUE_LOADS


class ValuesTransfers(NamedTuple):
    """q, dout: as Transfers has them."""

    q: Any
    dout: Any


class Load(base.Load):
    loads = LOADS

    def first_column(self, name: str) -> int:
        return 1 if name == "v" else 0


class LoadForValues(base.Load):
    loads = VALUE_LOADS
