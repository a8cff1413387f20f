"""The warp that issues all products: S(0)   O(0) S(1)   O(1) S(2)   ...

The tensor core executes them in the order of their issue. So scores that are there tell that the output
before them was added to, and scores may overwrite the probabilities that lie over them.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, Tile, tile_of
from fa4flex.kernels.common.tensor_core import elect
from fa4flex.kernels.decode_sm100.config import Config
from fa4flex.kernels.decode_sm100.resources import Products, Shared
from fa4flex.kernels.plan.problem import MMA_K

WIDE = 8
"""Elements of 16 bits that a lane clears at once."""


class Mma:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.cluster = Cluster(1)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        tile = tile_of(part, arguments, self.hooks, self.config)
        self.multiply(tile, shared, pipes, products, base)

    @cute.jit
    def multiply(
        self,
        tile: Tile,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        """All products of a tile."""
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        v_state = k_state.clone()
        phase = Int32(0)
        if tile.first < tile.last:
            cute.arch.mbarrier_wait(pipes.q_full, 0)
            k_state = self.scores(shared, pipes, products, base, k_state)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            pipes.v.consumer_wait(v_state)
            if const_expr(self.config.clears):
                self.clear_past_end(shared, v_state.index, tile, tile_at(tile.keys, i))
            self.values(shared, pipes, products, base, v_state.index, phase, i - tile.first)
            pipes.v.consumer_release(v_state)
            v_state.advance()
            phase ^= 1
            if i + 1 < tile.last:
                k_state = self.scores(shared, pipes, products, base, k_state)
            else:
                self.cluster.commit(pipes.o_full)

    @cute.jit
    def scores(
        self,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
        k_state: pipeline.PipelineState,
    ) -> pipeline.PipelineState:
        """S = q k of the next tile of keys."""
        pipes.k.consumer_wait(k_state)
        k = products.scores.make_fragment_B(shared.k_operand)[None, None, None, k_state.index]
        steps, result = range(self.config.head_dim // MMA_K), base + self.config.memory.scores
        products.scores_product.issue(result, products.queries_at(base), k, steps, False)
        self.cluster.commit(pipes.s_full)
        pipes.k.consumer_release(k_state)
        k_state.advance()
        return k_state

    @cute.jit
    def values(
        self,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
        stage: Int32,
        phase: Int32,
        number: Int32,
    ) -> None:
        """O += p v: values of this stage, probabilities of this phase; tile number 0 begins."""
        p, product = products.probabilities_at(base), products.values_product
        v = products.values.make_fragment_B(shared.v_operand)[None, None, None, stage]
        words = product.prepared(base + self.config.memory.output, p, v)
        # The lane that issues is elected before all wait: nothing is to be done between wait and product.
        elected = elect()
        cute.arch.mbarrier_wait(pipes.p_full, phase)
        if elected:
            product.put(words, p, v, range(self.config.tile_n // MMA_K), number > 0)

    @cute.jit
    def clear_past_end(
        self, shared: cutlass.Constexpr[Shared], stage: Int32, tile: Tile, key_tile: Int32
    ) -> None:
        """Zero the values past the end of a sequence: what lies there is anything, and a probability 0 times
        NaN is NaN. Dense tensors end where TMA fills in zeros itself."""
        end = tile.kv_len - key_tile * self.config.tile_n
        if end < self.config.tile_n:
            pieces = self.config.head_dim_v // WIDE
            zeros = cute.make_rmem_tensor((WIDE,), shared.v.element_type)
            zeros.fill(shared.v.element_type(0.0))
            first = cutlass.max(end, 0) * pieces + cute.arch.lane_idx()
            for i in cutlass.range(first, self.config.tile_n * pieces, 32, unroll=1):
                values = cute.local_tile(shared.v[None, i // pieces, stage], (WIDE,), (i % pieces,))
                cute.autovec_copy(zeros, values)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
