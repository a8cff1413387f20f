"""The warps that bring a block's keys, and values, once, then output gradients and queries with their rows'
numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.two_kernels.roles import LOADS, VALUE_LOADS


class ValuesTransfers(NamedTuple):
    """q, k, dout: as base.Transfers has them."""

    q: Any
    k: Any
    dout: Any


class Load(base.Load):
    loads = LOADS


class LoadForValues(base.Load):
    loads = VALUE_LOADS
