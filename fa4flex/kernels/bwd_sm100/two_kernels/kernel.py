"""Two Blackwell backward kernels of heads up to 256, one after the other: each computes the scores itself.

load warp --[q, dout rings]--> multiply warp <--(k once; S; P)--> compute warpgroups --> dv
          --[lse2 ring]-------------------------------------------^

load warp --[k once; q, dout rings]--> multiply warp <--(v once; S, dP; dS)--> compute warpgroups --> dk
          --[lse2, delta rings]-----------------+------------------------------^
                                                +--(dQ')--> reduce warpgroup --> dq_sum
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuda.bindings import driver as cuda
from cutlass import cute

from fa4flex.kernels.bwd_sm100 import kernel as base
from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.resources import Shared
from fa4flex.kernels.bwd_sm100.two_kernels.compute import Compute, ComputeForValues
from fa4flex.kernels.bwd_sm100.two_kernels.config import STEP, Config
from fa4flex.kernels.bwd_sm100.two_kernels.load import Load, LoadForValues, Transfers, ValuesTransfers
from fa4flex.kernels.bwd_sm100.two_kernels.mma import Mma, MmaForValues
from fa4flex.kernels.bwd_sm100.two_kernels.reduce import Idle, Reduce
from fa4flex.kernels.bwd_sm100.two_kernels.resources import Products, ValuesProducts, ValuesShared
from fa4flex.kernels.bwd_sm100.two_kernels.roles import barrier_table, value_barriers
from fa4flex.kernels.common.arguments import BackwardArguments
from fa4flex.kernels.common.hooks import Hooks


class OfValues(base.Backward):
    """The kernel for dV."""

    roles = LoadForValues, MmaForValues, ComputeForValues, Idle
    transfers_kind = ValuesTransfers
    barrier_table = staticmethod(value_barriers)
    numbers = ("lse2",)
    operands = ("q", "dout")

    def products(self, arguments: BackwardArguments) -> ValuesProducts:
        return ValuesProducts(self.config, arguments.q.element_type, self.cluster)

    def shared(self, storage: Any, products: ValuesProducts) -> ValuesShared:
        return ValuesShared(
            **self.operand_tensors(storage, products),
            lse2=storage.lse2.get_tensor(cute.make_layout((STEP, self.config.q_stages))),
        )


class OfKeys(base.Backward):
    """The kernel for dK and dQ."""

    roles = Load, Mma, Compute, Reduce
    transfers_kind = Transfers
    operands = ("q", "k", "dout", "ds")
    barrier_table = staticmethod(barrier_table)

    def products(self, arguments: BackwardArguments) -> Products:
        return Products(self.config, arguments.q.element_type, self.cluster)

    def shared(self, storage: Any, products: Products) -> Shared:
        # A key's queries lie next to each other, in a row of the swizzle.
        rows = cute.make_layout((STEP, ROWS), stride=(1, STEP))
        return Shared(**self.tensors(storage, products, rows), v=None, dout_t=None)


class Backward:
    """Both kernels for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "backward"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        # Gradients of captured tensors are of the kernel that has dS.
        self.values = OfValues(config.values, replace(hooks, shares=(), slope=None))
        self.keys = OfKeys(config, hooks)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream: cuda.CUstream) -> None:
        self.values(arguments, stream)
        self.keys(arguments, stream)
