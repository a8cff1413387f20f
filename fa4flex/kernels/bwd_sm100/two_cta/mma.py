"""The warp that issues all products, in the first CTA of a pair. For step j of a pair's J, in this order:

    S(0) dP(0) dV(0)   S(1) dK(0) dP(1) dQ(0) dV(1)   S(2) dK(1) dP(2) dQ(1) dV(2)   ...   dK(J-1) dQ(J-1)

dQ(j) takes dS of both CTAs: while half of dS goes to the other CTA, dK(j) and dP(j + 1) are multiplied. It
lies over the second half of the scores, which are read when their probabilities are there.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute, pipeline

from fa4flex.kernels.bwd_sm100 import mma as base
from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.mma import Inputs
from fa4flex.kernels.bwd_sm100.resources import Products, fragment_columns
from fa4flex.kernels.bwd_sm100.two_cta.config import KEPT, PACKED
from fa4flex.kernels.bwd_sm100.two_cta.resources import Shared
from fa4flex.kernels.common.backward import BackwardArguments, KeyWork
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.tensor_core import arrive_once, zero_here

SENT_BYTES = 2 * KEPT * ROWS
"""Bytes of dS that a CTA sends to the other one per step."""


class Mma(base.Mma):
    columns_apart = True

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
        if self.cluster.leads():
            self.lead(arguments, work, shared, pipes, products, base)
        else:
            self.tell(arguments, work, pipes)

    @cute.jit
    def lead(
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
        inputs = Inputs(products, self.operands(shared, products, base), pipes, base)
        q_state, q_t_state = (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
            for _ in range(2)
        )
        do_state, do_t_state = (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
            for _ in range(2)
        )
        steps = self.scheduler.steps(work, arguments)
        phase = Int32(0)
        if steps > 0:
            cute.arch.mbarrier_wait(pipes.k_full, 0)
            self.scores(inputs, q_state)
            q_state.advance()
            cute.arch.mbarrier_wait(pipes.v_full, 0)
            self.dprob(inputs, do_state)
            do_state.advance()
            cute.arch.mbarrier_wait(pipes.p_full, 0)
            self.dv(inputs, do_t_state, False)
            do_t_state.advance()
            cute.arch.mbarrier_wait(pipes.k_t_full, 0)
        for j in cutlass.range(1, steps, unroll=1):
            zero = zero_here(j, steps)
            cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
            self.scores(inputs, q_state, zero)
            q_state.advance()
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(inputs, q_t_state, j > 1, zero)
            q_t_state.advance()
            self.dprob(inputs, do_state, zero)
            do_state.advance()
            cute.arch.mbarrier_wait(pipes.p_full, phase ^ 1)
            self.await_ds(pipes, phase)
            cute.arch.mbarrier_wait(pipes.ds_there, phase)
            self.dq(inputs, zero)
            phase ^= 1
            self.dv(inputs, do_t_state, True, zero)
            do_t_state.advance()
        if steps > 0:
            self.cluster.commit(pipes.dv_full)
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(inputs, q_t_state, steps > 1)
            self.cluster.commit(pipes.dk_full)
            cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
            self.await_ds(pipes, phase)
            cute.arch.mbarrier_wait(pipes.ds_there, phase)
            self.dq(inputs)

    @cute.jit
    def tell(self, arguments: BackwardArguments, work: KeyWork, pipes: cutlass.Constexpr[Pipes]) -> None:
        """The second CTA's: tell the first one what has come here."""
        phase = Int32(0)
        for _ in cutlass.range(self.scheduler.steps(work, arguments), unroll=1):
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

    def operand_columns(self) -> tuple[list[int], list[int]]:
        memory = self.config.memory
        return fragment_columns(memory.probabilities, PACKED), fragment_columns(memory.ds, KEPT)
