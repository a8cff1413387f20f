"""The warp that issues all products. For step j of a block's J, in this order:

    S(0) dP(0) dV(0)   S(1) dK(0) dQ(0) dP(1) dV(1)   S(2) dK(1) dQ(1) dP(2) dV(2)   ...   dK(J-1) dQ(J-1)

The tensor core executes products in the order of their issue (FlashAttention-4's backward pipeline). While
the probabilities of a step are made of its scores, dK and dQ of the step before are multiplied; S(j + 1) may
overwrite the probabilities that lie over scores, as dV(j) has read them, and dQ(j) the dS that lie over dP,
as dK(j) has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
from cutlass import Boolean, Int32, cute, pipeline

from fa4flex.kernels.bwd_sm100.config import ROWS, Config
from fa4flex.kernels.bwd_sm100.resources import Products, Shared, operand_columns
from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyWork
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.plan.problem import MMA_K

STEPS = range(ROWS // MMA_K)
"""Instructions of a product that sums over queries."""


Zero: TypeAlias = Int32 | int
"""0, which the compiler does not know where it is a value: see `zero_here`."""


@dataclass(frozen=True)
class Operands:
    """Shared-memory descriptors, by stage; p and dS' lie in tensor memory, by instruction."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dout_t: cute.Tensor
    q_t: cute.Tensor
    ds: cute.Tensor
    k_t: cute.Tensor
    p: list[cute.Pointer]
    ds_t: list[cute.Pointer]


@dataclass(frozen=True)
class Inputs:
    """Inputs of all products; base is where tensor memory begins."""

    products: Products
    operands: Operands
    pipes: Any
    """Pipes, or a pair's."""
    base: cute.Pointer


class Mma:
    columns_apart = False
    """True if what is taken by columns comes by rings of its own."""

    def __init__(self, config: Config, scheduler: BackwardTileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        config = self.config
        inputs = Inputs(products, self.operands(shared, products, base), pipes, base)
        # The Q that S takes, and the one that dK takes.
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
        steps = self.scheduler.steps(work, arguments)
        phase = Int32(0)
        if steps > 0:
            cute.arch.mbarrier_wait(pipes.k_full, 0)
            self.scores(inputs, s_state)
            s_state.advance()
            cute.arch.mbarrier_wait(pipes.v_full, 0)
            self.dprob(inputs, do_state)
            cute.arch.mbarrier_wait(pipes.p_full, phase)
            self.dv(inputs, do_state, False)
            do_state.advance()
        for j in cutlass.range(1, steps, unroll=1):
            self.scores(inputs, s_state)
            s_state.advance()
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(inputs, q_state, j > 1)
            q_state.advance()
            self.dq(inputs)
            cute.arch.mbarrier_wait(pipes.dq_empty, phase)
            phase ^= 1
            self.dprob(inputs, do_state)
            cute.arch.mbarrier_wait(pipes.p_full, phase)
            self.dv(inputs, do_state, True)
            do_state.advance()
        if steps > 0:
            self.cluster.commit(pipes.dv_full)
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(inputs, q_state, steps > 1)
            self.cluster.commit(pipes.dk_full)
            self.dq(inputs)

    def operands(self, shared: Shared, products: Products, base: cute.Pointer) -> Operands:
        p, ds = self.operand_columns()
        return Operands(
            products.scores.make_fragment_A(shared.k)[None, None, None, 0],
            products.scores.make_fragment_B(shared.q),
            products.dprob.make_fragment_A(shared.v)[None, None, None, 0],
            products.dprob.make_fragment_B(shared.dout),
            products.dv.make_fragment_B(shared.dout_t),
            products.dk.make_fragment_B(shared.q_t),
            products.dq.make_fragment_A(shared.ds)[None, None, None, 0],
            products.dq.make_fragment_B(shared.k_t)[None, None, None, 0],
            [base + column for column in p],
            [base + column for column in ds],
        )

    def operand_columns(self) -> tuple[list[int], list[int]]:
        """Columns of probabilities, and of dS, in tensor memory."""
        memory = self.config.memory
        return operand_columns(memory.probabilities), operand_columns(memory.ds)

    def scores(self, inputs: Inputs, state: pipeline.PipelineState, zero: Zero = 0) -> None:
        operands, steps = inputs.operands, range(self.config.depths[0])
        inputs.pipes.q.consumer_wait(state)
        q = operands.q[None, None, None, state.index]
        acc = inputs.base + self.config.memory.scores
        inputs.products.square.issue(acc, operands.k, q, steps, False, zero)
        self.cluster.commit(inputs.pipes.s_full)
        if self.columns_apart:
            inputs.pipes.q.consumer_release(state)

    def dprob(self, inputs: Inputs, state: pipeline.PipelineState, zero: Zero = 0) -> None:
        operands, steps = inputs.operands, range(self.config.depths[1])
        inputs.pipes.dout.consumer_wait(state)
        dout = operands.dout[None, None, None, state.index]
        acc = inputs.base + self.config.memory.dprob
        inputs.products.square.issue(acc, operands.v, dout, steps, False, zero)
        self.cluster.commit(inputs.pipes.dp_full)
        if self.columns_apart:
            inputs.pipes.dout.consumer_release(state)

    def dv(self, inputs: Inputs, state: pipeline.PipelineState, add: Boolean | bool, zero: Zero = 0) -> None:
        ring, operands = self.columns_of(inputs.pipes, "dout", state), inputs.operands
        dout = operands.dout_t[None, None, None, state.index]
        acc = inputs.base + self.config.memory.dv
        inputs.products.to_dv.issue(acc, moved(operands.p, zero), dout, STEPS, add, zero)
        ring.consumer_release(state)

    def dk(self, inputs: Inputs, state: pipeline.PipelineState, add: Boolean | bool, zero: Zero = 0) -> None:
        ring, operands = self.columns_of(inputs.pipes, "q", state), inputs.operands
        q = operands.q_t[None, None, None, state.index]
        acc = inputs.base + self.config.memory.dk
        inputs.products.to_dk.issue(acc, moved(operands.ds_t, zero), q, STEPS, add, zero)
        ring.consumer_release(state)

    def columns_of(self, pipes: Any, name: str, state: pipeline.PipelineState) -> pipeline.PipelineTmaUmma:
        """Ring of an operand that is taken by columns, whose stage is there: that of its rows, which was
        waited for, or its own."""
        if not self.columns_apart:
            return getattr(pipes, name)
        ring = getattr(pipes, f"{name}_t")
        ring.consumer_wait(state)
        return ring

    def dq(self, inputs: Inputs, zero: Zero = 0) -> None:
        operands, steps = inputs.operands, range(self.config.tile_n // MMA_K)
        acc = inputs.base + self.config.memory.dq
        inputs.products.to_dq.issue(acc, operands.ds, operands.k_t, steps, False, zero)
        self.cluster.commit(inputs.pipes.dq_full)


def moved(columns: list[cute.Pointer], zero: Zero) -> list[cute.Pointer]:
    return [column + zero for column in columns]
