"""The warp that issues all products, where scores of one query tile have two stages.

By key tile j, in this order:

    S(0) S(1)   O(0) S(2)   O(1) S(3)   O(2) S(4)   ...

While scores are multiplied, the softmax of those before them is taken. The last outputs of a tile of queries
alternate with the first two scores of the next one: O(n - 2) S'(0) O(n - 1) S'(1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.tensor_core import zero_here
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.fwd_sm100.mma import Mma, Operands, Staged
from fa4flex.kernels.fwd_sm100.resources import Products, Shared

TURNS = 4
"""Key tiles after which stages of scores and the phases of their barriers are the first ones again."""


def after(count: Int32) -> Int32:
    """The next key tile's number, modulo TURNS."""
    return (count + 1) & (TURNS - 1)


class Span(NamedTuple):
    """Key tiles [first, last), of which those from `following` to `end` are of the next tile of queries."""

    first: Int32
    last: Int32
    following: Int32
    end: Int32


class MmaAhead(Mma):
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
        turn, added, phase = Int32(0), Int32(0), Int32(0)
        # Not the scheduler's walk: the next tile is known while the last products of this one are issued.
        number = self.scheduler.first()
        work = self.scheduler.work(number, grid, arguments)
        count = self.keys(work, grid, arguments).count
        begun = Int32(0)
        if work.valid:
            begun = cutlass.min(count, 2)
            span = Span(Int32(0), begun, Int32(0), count)
            k_state, turn = self.ahead(products, operands, pipes, span, (k_state, turn), phase)
        while work.valid:
            number = self.scheduler.receive(number, pipes.next, phase)
            following = self.scheduler.work(number, grid, arguments)
            coming = self.keys(following, grid, arguments).count
            phase ^= 1
            end = count
            if following.valid:
                end = count + coming
            for j in cutlass.range(1, count + 1, unroll=1):
                pipes.v.consumer_wait(v_state)
                if const_expr(config.clears):
                    keys = self.keys(work, grid, arguments)
                    self.clear_past_end(shared, v_state.index, work, tile_at(keys, j - 1))
                staged = Staged(v_state.index, zero_here(j, count))
                self.values(products, operands, pipes, staged, added >> 1, 0, j > 1, added & 1)
                self.cluster.commit(pipes.o_full)
                pipes.v.consumer_release(v_state)
                v_state.advance()
                added = after(added)
                until = cutlass.min(j + 2, end)
                span = Span(begun, until, count, end)
                k_state, turn = self.ahead(products, operands, pipes, span, (k_state, turn), phase)
                begun = cutlass.max(begun, until)
            begun -= count
            work, count = following, coming

    @cute.jit
    def ahead(
        self,
        products: cutlass.Constexpr[Products],
        operands: cutlass.Constexpr[Operands],
        pipes: cutlass.Constexpr[Pipes],
        span: Span,
        states: Any,
        phase: Int32,
    ) -> Any:
        """Scores of key tiles; queries of the next tile come in this phase. Returns the states after them."""
        first, last, following, end = span
        k_state, turn = states
        for i in cutlass.range(first, last, unroll=1):
            pipes.k.consumer_wait(k_state)
            if i == following:
                cute.arch.mbarrier_wait(pipes.q_full, phase)
            staged = Staged(k_state.index, zero_here(i, last))
            ends = (i + 1 == following) | (i + 1 == end)
            self.scores(products, operands, pipes, staged, 0, ends, turn & 1)
            pipes.k.consumer_release(k_state)
            k_state.advance()
            turn = after(turn)
        return k_state, turn
