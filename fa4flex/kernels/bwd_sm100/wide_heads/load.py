"""The warp that brings keys and values once, then output gradients and queries with their rows' numbers."""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.wide_heads.roles import LOADS


class Load(base.Load):
    loads = LOADS
