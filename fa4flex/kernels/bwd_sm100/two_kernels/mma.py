"""The warps that issue all products. For step j of a block's J, in this order, for dK and dQ:

    S(0) dP(0)   S(1) dK(0) dQ(0) dP(1)   S(2) dK(1) dQ(1) dP(2)   ...   dK(J-1) dQ(J-1)

While dS are made of dP, the next scores are multiplied, and probabilities are made of them during dK and dQ.
dQ takes the places of dP and of the scores, by halves of the head: the first one is read while the second is
multiplied, and the second one during the next dP. And for dV:

    S(0)   S(1) dV(0)   S(2) dV(1)   ...   dV(J-1)

Scores of the next step are multiplied while probabilities are made of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute, pipeline

from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.mma import Zero
from fa4flex.kernels.bwd_sm100.resources import Shared
from fa4flex.kernels.bwd_sm100.two_kernels.config import PACKED, STEP
from fa4flex.kernels.bwd_sm100.two_kernels.resources import Products, ValuesProducts, ValuesShared
from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyWork
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.tensor_core import zero_here
from fa4flex.kernels.plan.problem import MMA_K

STEPS = range(STEP // MMA_K)
"""Instructions of a product that sums over queries."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of all products; base is where tensor memory begins."""

    products: Any
    shared: Any
    pipes: Pipes
    base: cute.Pointer


class Mma:
    """For dK and dQ."""

    def __init__(self, config: Any, scheduler: BackwardTileScheduler, cluster: Cluster) -> None:
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
        config, inputs = self.config, Inputs(products, shared, pipes, base)
        # The Q that S takes, and the one that dK takes.
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
        steps = self.scheduler.steps(work, arguments)
        phase = Int32(0)
        if steps > 0:
            cute.arch.mbarrier_wait(pipes.k_full, 0)
            self.scores(inputs, s_state, 0)
            s_state.advance()
            cute.arch.mbarrier_wait(pipes.v_full, 0)
        for j in cutlass.range(steps, unroll=1):
            zero = zero_here(j, steps)
            cute.arch.mbarrier_wait(pipes.dq_early, phase ^ 1)
            self.dprob(inputs, do_state, zero)
            do_state.advance()
            if j + 1 < steps:
                cute.arch.mbarrier_wait(pipes.s_read, phase)
                cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
                self.scores(inputs, s_state, zero)
                s_state.advance()
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(inputs, q_state, j > 0, zero)
            q_state.advance()
            self.dq(inputs, 0, zero)
            if j + 1 < steps:
                cute.arch.mbarrier_wait(pipes.s_read, phase ^ 1)
            else:
                self.cluster.commit(pipes.dk_full)
                cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
            self.dq(inputs, 1, zero)
            phase ^= 1

    def dprob(self, inputs: Inputs, state: pipeline.PipelineState, zero: Zero) -> None:
        products, shared, pipes = inputs.products, inputs.shared, inputs.pipes
        pipes.dout.consumer_wait(state)
        dout = products.dprob.make_fragment_B(shared.dout)[None, None, None, state.index]
        acc, steps = inputs.base + self.config.memory.dprob, range(self.config.depths[1])
        products.held.issue(acc, self.held(inputs, steps, zero), dout, steps, False, zero)
        self.cluster.commit(pipes.dp_full)
        pipes.dout.consumer_release(state)

    def held(self, inputs: Inputs, steps: range, zero: Zero) -> list[cute.Pointer]:
        """First column of each instruction's part of what the block holds in tensor memory."""
        first = inputs.base + self.config.held + zero
        return [first + step * (MMA_K // 2) for step in steps]

    def scores(self, inputs: Inputs, state: pipeline.PipelineState, zero: Zero) -> None:
        products, shared = inputs.products, inputs.shared
        acc = inputs.base + self.config.memory.scores
        k = products.scores.make_fragment_A(shared.k)[None, None, None, 0]
        inputs.pipes.q.consumer_wait(state)
        q = products.scores.make_fragment_B(shared.q)[None, None, None, state.index]
        products.square.issue(acc, k, q, range(self.config.depths[0]), False, zero)
        self.cluster.commit(inputs.pipes.s_full)

    def dk(self, inputs: Inputs, state: pipeline.PipelineState, add: Boolean, zero: Zero) -> None:
        memory, products = self.config.memory, inputs.products
        ds = [inputs.base + column + zero for column in operand_columns(memory.ds)]
        q = products.dk.make_fragment_B(inputs.shared.q_t)[None, None, None, state.index]
        products.to_dk.issue(inputs.base + memory.dk, ds, q, STEPS, add, zero)
        inputs.pipes.q.consumer_release(state)

    def dq(self, inputs: Inputs, half: int, zero: Zero) -> None:
        """dQ' of a half of the head: over dP, and over the scores."""
        products, shared, memory = inputs.products, inputs.shared, self.config.memory
        k_t = products.dq.make_fragment_A(shared.k_t)[None, None, None, 0]
        ds = products.dq.make_fragment_B(shared.ds)[None, None, None, 0]
        columns = cute.make_tensor(k_t[None, half, None].iterator, k_t.layout)
        acc = inputs.base + (memory.scores if half else memory.dprob)
        products.to_dq.issue(acc, columns, ds, range(ROWS // MMA_K), False, zero)
        self.cluster.commit(inputs.pipes.dq_full if half else inputs.pipes.dq_half)


class MmaForValues(Mma):
    """For dV."""

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        shared: cutlass.Constexpr[ValuesShared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[ValuesProducts],
        base: cute.Pointer,
    ) -> None:
        config, inputs = self.config, Inputs(products, shared, pipes, base)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
        steps = self.scheduler.steps(work, arguments)
        if steps > 0:
            cute.arch.mbarrier_wait(pipes.k_full, 0)
            self.scores(inputs, q_state, 0)
            q_state.advance()
        for j in cutlass.range(steps, unroll=1):
            zero = zero_here(j, steps)
            if j + 1 < steps:
                self.scores(inputs, q_state, zero)
                q_state.advance()
            self.dv(inputs, do_state, p_state, (j > 0, zero))
            do_state.advance()
            p_state.advance()
        if steps > 0:
            self.cluster.commit(pipes.dv_full)

    def scores(self, inputs: Inputs, state: pipeline.PipelineState, zero: Zero) -> None:
        products, steps = inputs.products, range(self.config.depths[0])
        acc = inputs.base + self.config.memory.scores + state.index * self.config.score_columns
        inputs.pipes.q.consumer_wait(state)
        q = products.scores.make_fragment_B(inputs.shared.q)[None, None, None, state.index]
        products.held.issue(acc, self.held(inputs, steps, zero), q, steps, False, zero)
        self.cluster.commit(inputs.pipes.s_full + state.index)
        inputs.pipes.q.consumer_release(state)

    def dv(
        self,
        inputs: Inputs,
        state: pipeline.PipelineState,
        p_state: pipeline.PipelineState,
        more: tuple[Boolean, Zero],
    ) -> None:
        config, pipes, products, (add, zero) = self.config, inputs.pipes, inputs.products, more
        first = inputs.base + p_state.index * config.score_columns + zero
        p = [first + column for column in operand_columns(config.memory.probabilities)]
        pipes.dout.consumer_wait(state)
        cute.arch.mbarrier_wait(pipes.p_full + p_state.index, p_state.phase)
        dout = products.dv.make_fragment_B(inputs.shared.dout_t)[None, None, None, state.index]
        products.to_dv.issue(inputs.base + config.memory.dv, p, dout, STEPS, add, zero)
        pipes.dout.consumer_release(state)


def operand_columns(firsts: tuple[int, int]) -> list[int]:
    """First column of each instruction's first operand in tensor memory: two queries in a column, and each
    compute warpgroup's queries for themselves."""
    return [first + column for first in firsts for column in range(0, PACKED, MMA_K // 2)]
