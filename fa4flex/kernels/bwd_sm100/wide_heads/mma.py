"""The warp that issues all products. For step j of a block's J, in this order:

    S(0) dP(0) dV(0) dK(0) dQ(0)   S(1) dP(1) dV(1) dK(1) dQ(1)   ...   dV(J-1) dK(J-1) dQ(J-1)

Beside dV and dK, tensor memory has 192 columns left, in which all else takes turns. S(j + 1) waits until the
columns of dQ(j) under it are read, and dP(j) until the scores are, not until there are probabilities of them:
those are made while it is multiplied. dK(j) comes before dQ(j): the next Q, which takes its place, arrives
while dQ(j) is multiplied.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute, pipeline

from fa4flex.kernels.bwd_sm100 import mma as base
from fa4flex.kernels.bwd_sm100.config import HALF
from fa4flex.kernels.bwd_sm100.mma import Inputs
from fa4flex.kernels.bwd_sm100.resources import Products, Shared, fragment_columns
from fa4flex.kernels.bwd_sm100.wide_heads.config import PACKED
from fa4flex.kernels.common.backward import BackwardArguments, KeyWork
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.tensor_core import zero_here


class Mma(base.Mma):
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
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
        steps = self.scheduler.steps(work, arguments)
        phase = Int32(0)
        if steps > 0:
            cute.arch.mbarrier_wait(pipes.k_full, 0)
        for j in cutlass.range(steps, unroll=1):
            zero = zero_here(j, steps)
            last = j + 1 == steps
            cute.arch.mbarrier_wait(pipes.dq_begun, phase ^ 1)
            self.scores(inputs, q_state, zero)
            cute.arch.mbarrier_wait(pipes.v_full, 0)
            cute.arch.mbarrier_wait(pipes.dq_empty, phase ^ 1)
            cute.arch.mbarrier_wait(pipes.s_read, phase)
            self.dprob(inputs, do_state, zero)
            cute.arch.mbarrier_wait(pipes.p_full, phase)
            self.dv(inputs, do_state, j > 0, zero)
            do_state.advance()
            if last:
                self.cluster.commit(pipes.dv_full)
            cute.arch.mbarrier_wait(pipes.ds_full, phase)
            self.dk(inputs, q_state, j > 0, zero)
            q_state.advance()
            if last:
                self.cluster.commit(pipes.dk_full)
            self.dq(inputs, zero)
            phase ^= 1

    def operand_columns(self) -> tuple[list[int], list[int]]:
        memory = self.config.memory
        return fragment_columns(memory.probabilities, PACKED), fragment_columns(memory.ds, HALF)
