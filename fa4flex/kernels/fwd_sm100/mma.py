"""The warp that issues all products.

By query tile i and key tile j, in this order:

    S_0(0) S_1(0)   O_0(0) S_0(1) O_1(0) S_1(1)   O_0(1) S_0(2) O_1(1) S_1(2)   ...

The tensor core executes products in the order of their issue. So scores that are there tell that the output
of the same query tile was added to before, and scores may overwrite the probabilities that lie over them.
While one query tile is multiplied, the other's softmax runs. The last outputs of a block's tile of queries
come between the first scores of its next one: the softmax does not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, const_expr, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.tensor_core import elect, instruction_depth, zero_here
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm100.config import Config
from fa4flex.kernels.fwd_sm100.resources import Products, Shared, stage_column
from fa4flex.kernels.plan.problem import MMA_K


class Staged(NamedTuple):
    """Operand in a ring: its stage, and the 0 that is added to its address (`zero_here`)."""

    stage: Int32
    zero: Int32


@dataclass(frozen=True)
class Operands:
    """Operands of MMAs: q, p and the accumulators by query tile, k and v by stage. q, k and v are
    shared-memory descriptors, p, scores and out lie in tensor memory."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: tuple[cute.Tensor, ...]
    scores: tuple[cute.Tensor, ...]
    out: tuple[cute.Tensor, ...]


class Mma:
    def __init__(self, config: Config, scheduler: TileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        config = self.config
        operands = self.operands(shared, products, base)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.kv_stages[0])
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.kv_stages[1])
        p_phase, phase = Int32(0), Int32(0)
        # Not the scheduler's walk: the next tile is known while the last products of this one are issued.
        number = self.scheduler.first()
        work = self.scheduler.work(number, grid, arguments)
        count = self.keys(work, grid, arguments).count
        if work.valid:
            pipes.k.consumer_wait(k_state)
            for tile in cutlass.range_constexpr(config.q_tiles):
                cute.arch.mbarrier_wait(pipes.q_full + tile, phase)
                if const_expr(config.staggered and tile > 0):
                    cute.arch.mbarrier_wait(pipes.p_early + (tile - 1), p_phase)
                self.scores(products, operands, pipes, Staged(k_state.index, Int32(0)), tile, count == 1)
            pipes.k.consumer_release(k_state)
            k_state.advance()
        while work.valid:
            number = self.scheduler.receive(number, pipes.next, phase)
            following = self.scheduler.work(number, grid, arguments)
            coming = self.keys(following, grid, arguments).count
            phase ^= 1
            for j in cutlass.range(1, count + 1, unroll=1):
                ends = j == count
                more = not ends or following.valid
                last_scores = j + 1 == count or (ends and coming == 1)
                zero = zero_here(j, count)
                pipes.v.consumer_wait(v_state)
                if const_expr(config.clears):
                    keys = self.keys(work, grid, arguments)
                    self.clear_past_end(shared, v_state.index, work, tile_at(keys, j - 1))
                for tile in cutlass.range_constexpr(config.q_tiles):
                    staged = Staged(v_state.index, zero)
                    self.values(products, operands, pipes, staged, p_phase, tile, j > 1)
                    if ends:
                        self.cluster.commit(pipes.o_full + tile)
                    if const_expr(tile == config.q_tiles - 1):
                        pipes.v.consumer_release(v_state)
                    if more:
                        if const_expr(tile == 0):
                            pipes.k.consumer_wait(k_state)
                        if ends:
                            cute.arch.mbarrier_wait(pipes.q_full + tile, phase)
                        staged = Staged(k_state.index, zero)
                        self.scores(products, operands, pipes, staged, tile, last_scores)
                v_state.advance()
                if more:
                    pipes.k.consumer_release(k_state)
                    k_state.advance()
                p_phase ^= 1
            work, count = following, coming

    def operands(self, shared: Shared, products: Products, base: cute.Pointer) -> Operands:
        tiles = range(self.config.q_tiles)
        return Operands(
            products.scores.make_fragment_A(shared.q),
            products.scores.make_fragment_B(shared.k),
            products.values.make_fragment_B(shared.v),
            tuple(products.probabilities_at(base, tile) for tile in tiles),
            tuple(products.scores_at(base, tile) for tile in tiles),
            tuple(products.outputs_at(base, tile) for tile in tiles),
        )

    def keys(self, work: Work, grid: Grid, arguments: Arguments) -> KeyTiles:
        return self.scheduler.keys(self.scheduler.place(work, grid, arguments), work, arguments)

    @cute.jit
    def scores(
        self,
        products: cutlass.Constexpr[Products],
        operands: cutlass.Constexpr[Operands],
        pipes: cutlass.Constexpr[Pipes],
        staged: Staged,
        tile: cutlass.Constexpr[int],
        last: Boolean,
        turn: Int32 | None = None,
    ) -> None:
        """`turn`: of scores in stages, which one."""
        q, k = operands.q[None, None, None, tile], operands.k[None, None, None, staged.stage]
        steps, scores, barrier = range(self.config.depth), operands.scores[tile].iterator, tile
        if const_expr(turn is not None):
            scores, barrier = scores + stage_column(self.config, turn), turn
        products.scores_product.issue(scores, q, k, steps, False, staged.zero)
        self.cluster.commit(pipes.s_full + barrier)
        if last:
            self.cluster.commit(pipes.q_empty + tile)

    @cute.jit
    def values(
        self,
        products: cutlass.Constexpr[Products],
        operands: cutlass.Constexpr[Operands],
        pipes: cutlass.Constexpr[Pipes],
        staged: Staged,
        phase: Int32,
        tile: cutlass.Constexpr[int],
        accumulate: Boolean,
        turn: Int32 | None = None,
    ) -> None:
        """O += p v, in two parts: the first begins while the last probabilities are computed. `turn`: of
        probabilities in stages, which one."""
        p, v = operands.p[tile], operands.v[None, None, None, staged.stage]
        product = products.values_product
        words, barrier = product.prepared(operands.out[tile].iterator, p, v, staged.zero), tile
        if const_expr(turn is not None):
            words[1][0] = words[1][0] + stage_column(self.config, turn)
            barrier = turn
        depth = instruction_depth(products.value_kind)
        early, steps = self.config.early_keys // depth, self.config.tile_n // depth
        # The lane that issues is elected before all wait: nothing is to be done between wait and product.
        elected = elect()
        cute.arch.mbarrier_wait(pipes.p_early + barrier, phase)
        if elected:
            product.put(words, p, v, range(early), accumulate)
        if const_expr(early < steps):
            elected = elect()
            cute.arch.mbarrier_wait(pipes.p_late + barrier, phase)
            if elected:
                product.put(words, p, v, range(early, steps), True)

    @cute.jit
    def clear_past_end(
        self, shared: cutlass.Constexpr[Shared], stage: Int32, work: Work, key_tile: Int32
    ) -> None:
        """Zero the values past the end of a sequence: what lies there is another's, or nobody's, and a
        probability 0 times NaN is NaN. Dense tensors end where TMA fills in zeros itself."""
        end = work.kv_len - key_tile * self.config.tile_n
        if end < self.config.tile_n:
            values = shared.v[None, None, None, stage]
            for key in cutlass.range(cutlass.max(end, 0), self.config.tile_n, unroll=1):
                for d in cutlass.range(cute.arch.lane_idx(), self.config.head_dim_v, 32, unroll=1):
                    values[(d, key % MMA_K), 0, key // MMA_K] = values.element_type(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
