"""The warp that issues all products, in the first CTA of a pair. For step j of a pair's J, in this order:

    S(0) dP(0) dV(0)   S(1) dK(0) dP(1) dQ(0) dV(1)   S(2) dK(1) dP(2) dQ(1) dV(2)   ...   dK(J-1) dQ(J-1)

dQ(j) takes dS of both CTAs: while half of dS goes to the other CTA, dK(j) and dP(j + 1) are multiplied. It
lies over the second half of the scores, which are read when their probabilities are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute, pipeline

from fa4flex.codegen.kernels.bwd_sm100.config import ROWS
from fa4flex.codegen.kernels.bwd_sm100.multiply import STEPS, Operands
from fa4flex.codegen.kernels.bwd_sm100.parts import Products
from fa4flex.codegen.kernels.bwd_sm100_pair.config import CTAS, KEPT, PACKED, Config
from fa4flex.codegen.kernels.bwd_sm100_pair.parts import Pipes, Shared, operand_columns
from fa4flex.codegen.kernels.common.backward import BackwardArguments, BackwardCourse, KeyWork
from fa4flex.codegen.kernels.common.cluster import Cluster
from fa4flex.codegen.kernels.common.tensor_core import MMA_K, arrive_once, zero_here

PAIR_STEPS = range(CTAS * ROWS // MMA_K)
"""Instructions of a product that sums over the pair's keys."""

SENT_BYTES = 2 * KEPT * ROWS
"""Of dS, that a CTA sends to the other one per step."""


@dataclass(frozen=True)
class Given:
    """What all products need; base is where tensor memory begins."""

    products: Products
    operands: Operands
    pipes: Pipes
    base: cute.Pointer


class Multiply:
    def __init__(self, config: Config, course: BackwardCourse, cluster: Cluster) -> None:
        self.config = config
        self.course = course
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
        """The first CTA's."""
        config = self.config
        given = Given(products, self.operands(shared, products, base), pipes, base)
        q_state, q_t_state = (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
            for _ in range(2)
        )
        do_state, do_t_state = (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
            for _ in range(2)
        )
        steps = self.course.steps(work, arguments)
        phase = Int32(0)
        if steps > 0:
            cute.arch.mbarrier_wait(pipes.k_full, 0)
            self.scores(given, q_state)
            q_state.advance()
            cute.arch.mbarrier_wait(pipes.v_full, 0)
            self.dprob(given, do_state)
            do_state.advance()
            cute.arch.mbarrier_wait(pipes.p_full, 0)
            self.dv(given, do_t_state, False)
            do_t_state.advance()
            cute.arch.mbarrier_wait(pipes.k_t_full, 0)
        for j in cutlass.range(1, steps, unroll=1):
            zero = zero_here(j, steps)
            cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
            self.scores(given, q_state, zero)
            q_state.advance()
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(given, q_t_state, j > 1, zero)
            q_t_state.advance()
            self.dprob(given, do_state, zero)
            do_state.advance()
            cute.arch.mbarrier_wait(pipes.p_full, phase ^ 1)
            self.dq(given, phase, zero)
            phase ^= 1
            self.dv(given, do_t_state, True, zero)
            do_t_state.advance()
        if steps > 0:
            self.cluster.commit(pipes.dv_full)
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(given, q_t_state, steps > 1)
            self.cluster.commit(pipes.dk_full)
            cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
            self.dq(given, phase)

    @cute.jit
    def tell(self, arguments: BackwardArguments, work: KeyWork, pipes: cutlass.Constexpr[Pipes]) -> None:
        """The second CTA's: tell the first one what has come here."""
        phase = Int32(0)
        for _ in cutlass.range(self.course.steps(work, arguments), unroll=1):
            self.await_ds(pipes, phase)
            arrive_once(pipes.ds_there, first=True)
            phase ^= 1

    def await_ds(self, pipes: Pipes, phase: Int32) -> None:
        """Until dS of this CTA's queries and all keys is here, and products may read it."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pipes.ds_come, SENT_BYTES)
        cute.arch.mbarrier_wait(pipes.ds_come, phase)
        # The other CTA's threads wrote it, and they cannot say that products read it here.
        cute.arch.fence_proxy("async.shared", space="cta")

    def operands(self, shared: Shared, products: Products, base: cute.Pointer) -> Operands:
        memory = self.config.memory
        return Operands(
            products.scores.make_fragment_A(shared.k)[None, None, None, 0],
            products.scores.make_fragment_B(shared.q),
            products.dprob.make_fragment_A(shared.v)[None, None, None, 0],
            products.dprob.make_fragment_B(shared.dout),
            products.dv.make_fragment_B(shared.dout_t),
            products.dk.make_fragment_B(shared.q_t),
            products.dq.make_fragment_A(shared.ds)[None, None, None, 0],
            products.dq.make_fragment_B(shared.k_t)[None, None, None, 0],
            [base + column for column in operand_columns(memory.probabilities, PACKED)],
            [base + column for column in operand_columns(memory.ds, KEPT)],
        )

    def scores(self, given: Given, state: pipeline.PipelineState, zero: Int32 | int = 0) -> None:
        operands, steps = given.operands, range(self.config.head_dim // MMA_K)
        given.pipes.q.consumer_wait(state)
        q = operands.q[None, None, None, state.index]
        acc = given.base + self.config.memory.scores
        given.products.square.issue(acc, operands.k, q, steps, False, zero)
        self.cluster.commit(given.pipes.s_full)
        given.pipes.q.consumer_release(state)

    def dprob(self, given: Given, state: pipeline.PipelineState, zero: Int32 | int = 0) -> None:
        operands, steps = given.operands, range(self.config.head_dim_v // MMA_K)
        given.pipes.dout.consumer_wait(state)
        dout = operands.dout[None, None, None, state.index]
        acc = given.base + self.config.memory.dprob
        given.products.square.issue(acc, operands.v, dout, steps, False, zero)
        self.cluster.commit(given.pipes.dp_full)
        given.pipes.dout.consumer_release(state)

    def dv(
        self, given: Given, state: pipeline.PipelineState, add: Boolean | bool, zero: Int32 | int = 0
    ) -> None:
        operands = given.operands
        given.pipes.dout_t.consumer_wait(state)
        dout = operands.dout_t[None, None, None, state.index]
        acc = given.base + self.config.memory.dv
        given.products.to_dv.issue(acc, moved(operands.p, zero), dout, STEPS, add, zero)
        given.pipes.dout_t.consumer_release(state)

    def dk(
        self, given: Given, state: pipeline.PipelineState, add: Boolean | bool, zero: Int32 | int = 0
    ) -> None:
        operands = given.operands
        given.pipes.q_t.consumer_wait(state)
        q = operands.q_t[None, None, None, state.index]
        acc = given.base + self.config.memory.dk
        given.products.to_dk.issue(acc, moved(operands.ds_t, zero), q, STEPS, add, zero)
        given.pipes.q_t.consumer_release(state)

    def dq(self, given: Given, phase: Int32, zero: Int32 | int = 0) -> None:
        operands, pipes = given.operands, given.pipes
        self.await_ds(pipes, phase)
        cute.arch.mbarrier_wait(pipes.ds_there, phase)
        acc = given.base + self.config.memory.dq
        given.products.to_dq.issue(acc, operands.ds, operands.k_t, PAIR_STEPS, False, zero)
        self.cluster.commit(pipes.dq_full)


def moved(columns: list[cute.Pointer], zero: Int32 | int) -> list[cute.Pointer]:
    return [column + zero for column in columns]
