"""The warps that bring queries and output gradients with their rows' numbers; for dK and dQ, before them the
block's keys. What products have as their first operand in tensor memory, compute threads bring."""

from __future__ import annotations

from typing import Any, NamedTuple

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.two_kernels.roles import LOADS, VALUE_LOADS


class ValuesTransfers(NamedTuple):
    """q, dout: as base.Transfers has them."""

    q: Any
    dout: Any


class Transfers(NamedTuple):
    """q, k, dout: likewise."""

    q: Any
    k: Any
    dout: Any


class Load(base.Load):
    loads = LOADS


class LoadForValues(base.Load):
    loads = VALUE_LOADS
