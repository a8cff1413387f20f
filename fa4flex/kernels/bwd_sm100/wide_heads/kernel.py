"""The Blackwell backward kernel of wide heads: that of narrower ones with other roles (mma.py says in
which order they take turns in tensor memory)."""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100 import kernel as base
from fa4flex.kernels.bwd_sm100.wide_heads.compute import Compute
from fa4flex.kernels.bwd_sm100.wide_heads.load import Load
from fa4flex.kernels.bwd_sm100.wide_heads.mma import Mma
from fa4flex.kernels.bwd_sm100.wide_heads.reduce import Reduce
from fa4flex.kernels.bwd_sm100.wide_heads.roles import barrier_table


class Backward(base.Backward):
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    roles = Load, Mma, Compute, Reduce
    barrier_table = staticmethod(barrier_table)
