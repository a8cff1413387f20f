"""The Blackwell backward kernel of wide heads: that of narrower ones with other roles (multiply.py says in
which order they take turns in tensor memory)."""

from __future__ import annotations

from fa4flex.codegen.kernels.bwd_sm100 import kernel as alone
from fa4flex.codegen.kernels.bwd_sm100_wide.compute import Compute
from fa4flex.codegen.kernels.bwd_sm100_wide.load import Load
from fa4flex.codegen.kernels.bwd_sm100_wide.multiply import Multiply
from fa4flex.codegen.kernels.bwd_sm100_wide.parts import Pipes
from fa4flex.codegen.kernels.bwd_sm100_wide.reduce import Reduce
from fa4flex.codegen.kernels.bwd_sm100_wide.roles import BARRIERS


class Backward(alone.Backward):
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    roles = Load, Multiply, Compute, Reduce
    pipes_kind = Pipes
    barriers = BARRIERS
