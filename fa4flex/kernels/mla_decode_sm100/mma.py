"""The warp that issues all products: S(0)   O(0) S(1)   O(1) S(2)   ...

The tensor core executes them in the order of their issue. So scores that are there tell that the output
before them was added to, and that its probabilities are read.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, tile_of
from fa4flex.kernels.common.tensor_core import elect
from fa4flex.kernels.decode_sm100 import mma as base
from fa4flex.kernels.mla_decode_sm100.config import BLOCK, Config
from fa4flex.kernels.mla_decode_sm100.resources import Products, Shared
from fa4flex.kernels.plan.problem import MMA_K


class Mma(base.Mma):
    config: Config  # type: ignore[assignment]

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        first: cute.Pointer,
    ) -> None:
        """first: column of tensor memory."""
        tile = tile_of(part, arguments, self.hooks, self.config)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        phase = Int32(0)
        if tile.first < tile.last:
            cute.arch.mbarrier_wait(pipes.q_full, 0)
            self.scores(shared, pipes, products, first, state)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            if const_expr(self.config.clears):
                cute.arch.mbarrier_wait(pipes.s_full, phase)
                self.clear_past_end(shared, state.index, tile, tile_at(tile.keys, i))
            self.values(shared, pipes, products, first, state.index, phase, i - tile.first)
            pipes.k.consumer_release(state)
            state.advance()
            phase ^= 1
            if i + 1 < tile.last:
                self.scores(shared, pipes, products, first, state)
            else:
                self.cluster.commit(pipes.o_full)

    @cute.jit
    def scores(
        self,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        first: cute.Pointer,
        state: pipeline.PipelineState,
    ) -> None:
        """S = q k of the next tile of keys, which stay for their values."""
        pipes.k.consumer_wait(state)
        q = products.scores.make_fragment_A(shared.q_operand)[None, None, None, 0]
        k, rest = (
            products.scores.make_fragment_B(x)[None, None, None, state.index]
            for x in (shared.k_operand, shared.k_rest)
        )
        result, held, steps = first + self.config.memory.scores, products.queries_at(first), q.shape[2]
        products.held_product.issue(result, held, k, range(len(held)), False)
        products.scores_product.issue(result, q, rest, range(cute.size(steps)), True)
        self.cluster.commit(pipes.s_full)

    @cute.jit
    def values(
        self,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        first: cute.Pointer,
        stage: Int32,
        phase: Int32,
        number: Int32,
    ) -> None:
        """O += p v, by one product for each of the columns that an instruction adds to."""
        config, product = self.config, products.values_product
        p = products.values.make_fragment_A(shared.p_operand)[None, None, None, 0]
        every = []
        for i, operand in enumerate(shared.v_operands):
            v = products.values.make_fragment_B(operand)[None, None, None, stage]
            result = first + config.memory.output + i * config.product_columns // config.copies
            every.append((product.prepared(result, p, v), v))
        # The lane that issues is elected before all wait: nothing is to be done between wait and product.
        elected = elect()
        cute.arch.mbarrier_wait(pipes.p_full, phase)
        if elected:
            for words, v in every:
                product.put(words, p, v, range(BLOCK // MMA_K), number > 0)
