"""A consumer warpgroup: 64 keys, whose probabilities it adds up in registers while queries pass by.

Scores are transposed, S = K Q', so that a thread has two keys, and of each 8 queries of a step two. What it
adds up are its own queries' probabilities; four threads next to each other have all of a key, and add theirs
up at the end. The order is one and the same in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.bwd_sm90.config import KEYS
from fa4flex.kernels.common.backward import (
    BackwardTileScheduler,
    KeyGrid,
    KeyWork,
    QueryTiles,
    query_tile_at,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.fragment import computed_once, multiply, rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.transfer import release
from fa4flex.kernels.common.transposed import Slab
from fa4flex.kernels.mass_sm90.arguments import MassArguments
from fa4flex.kernels.mass_sm90.config import Config
from fa4flex.kernels.mass_sm90.resources import Shared, Step, Warpgroup

OWNERS = 4
"""Threads next to each other that have the probabilities of a key."""


class Consumer:
    def __init__(self, config: Config, hooks: Hooks, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler

    @cute.jit
    def run(
        self,
        arguments: MassArguments,
        grid: KeyGrid,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: cute.TiledMma,
    ) -> None:
        thread = cute.arch.thread_idx()[0]
        number = cute.arch.make_warp_uniform(thread // 128 - 1)
        # Kept: the compiler would read the thread's number anew in each step.
        lane = computed_once(thread) & 127
        mine = self.warpgroup(lane, number, shared, pipes, mma)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.q_stages)

        @cute.jit
        def add_up(work: KeyWork, phase: Int32, state: pipeline.PipelineState) -> pipeline.PipelineState:
            return self.tile(arguments, work, mine, state)

        self.scheduler.walk(grid, arguments, None, add_up, state)

    def warpgroup(
        self, lane: Int32, number: Int32, shared: Shared, pipes: Pipes, mma: cute.TiledMma
    ) -> Warpgroup:
        one = mma.get_slice(lane)
        k = cute.local_tile(shared.k, (KEYS, self.config.head_dim), (number, 0))
        a, b = mma.make_fragment_A(one.partition_A(k)), mma.make_fragment_B(one.partition_B(shared.q))
        return Warpgroup(lane, number, shared, pipes, mma, a, b)

    @cute.jit
    def tile(
        self,
        arguments: MassArguments,
        work: KeyWork,
        mine: cutlass.Constexpr[Warpgroup],
        state: pipeline.PipelineState,
    ) -> pipeline.PipelineState:
        """Sums of a tile of keys."""
        h, heads = work.part, Int32(arguments.q.shape[-2])
        columns = tuple(8 * (c // 2) + c % 2 for c in range(self.config.tile_m // 4))
        at = self.scheduler.place(work, h, heads, arguments)
        slab = Slab(at, self.first_key(work, mine.number, mine.lane), (0, 8), columns)
        queries = self.scheduler.queries(work, h, arguments)
        sums = cute.make_rmem_tensor((2,), Float32)
        sums.fill(0.0)
        cute.arch.mbarrier_wait(mine.pipes.k_full, 0)
        step = functools.partial(self.step, mine, slab, sums)
        first = queries.count if self.config.one_body else queries.masked_count
        state = steps(step, queries, 0, first, state, True)
        if const_expr(not self.config.one_body):
            state = steps(step, queries, first, queries.count, state, False)
        self.write(arguments, work, mine, sums)
        return state

    def first_key(self, work: KeyWork, number: Int32, lane: Int32) -> Int32:
        """The first of a thread's two."""
        return work.tile * self.config.tile_n + number * KEYS + lane // 32 * 16 + lane % 32 // 4

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Warpgroup],
        slab: cutlass.Constexpr[Slab],
        sums: cute.Tensor,
        state: pipeline.PipelineState,
        tile: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries."""
        config, stage = self.config, state.index
        scores = cute.make_rmem_tensor(mine.mma.partition_shape_C((KEYS, config.tile_m)), Float32)
        mine.pipes.q.consumer_wait(state, mine.pipes.q.consumer_try_wait(state))
        multiply(mine.mma, scores, mine.k, mine.q[None, None, None, stage], False, config.depth)
        warpgroup.wait_group(0)
        q_first = tile * config.tile_m + mine.lane % OWNERS * 2
        step = Step(mine.shared.lse2[None, stage], rows_and_columns(scores), q_first)
        self.add(mine, slab, sums, step, masked)
        release(mine.pipes.q, state)

    def add(self, mine: Warpgroup, slab: Slab, sums: cute.Tensor, step: Step, masked: bool) -> None:
        """Adds probabilities of a step to sums."""
        config, rows, grid, q_first = self.config, step.lse2, step.scores, step.q_first
        factor = slab.at.scale_log2 if self.hooks.factor is None else self.hooks.factor(slab.at)
        for first in range(0, config.tile_m // 4, config.together):
            lse2 = self.log_sums(rows, mine.lane, first)
            part = slab.part(first, config.together)
            part.modify(self.hooks, grid, q_first, masked)
            for c in range(config.together):
                for r in range(2):
                    x = grid[r, first + c] * factor - lse2[c]
                    grid[r, first + c] = cute.math.exp2(x, fastmath=True)
            if masked:
                part.mask(self.hooks, grid, q_first)
            for r in range(2):
                sums[r] = sums[r] + total([grid[r, first + c] for c in range(config.together)])

    def log_sums(self, rows: cute.Tensor, lane: Int32, first: int) -> cute.Tensor:
        """Log-sum-exps of the queries of a thread's columns from `first` on, an even number."""
        count = self.config.together
        found = cute.make_rmem_tensor((2, count // 2), Float32)
        pairs = cute.logical_divide(rows, cute.make_layout(2))
        for c in range(count // 2):
            cute.autovec_copy(pairs[None, 2 * first + 4 * c + lane % OWNERS], found[None, c])
        return cute.make_tensor(found.iterator, cute.make_layout(count))

    @cute.jit
    def write(
        self,
        arguments: MassArguments,
        work: KeyWork,
        mine: cutlass.Constexpr[Warpgroup],
        sums: cute.Tensor,
    ) -> None:
        """The sums of a thread's keys to global memory."""
        first = self.first_key(work, mine.number, mine.lane)
        for r in cutlass.range_constexpr(2):
            whole, key = cute.arch.warp_reduction_sum(sums[r], threads_in_group=OWNERS), first + 8 * r
            if mine.lane % OWNERS == 0 and key < work.kv_len:
                place = work.kv_offset + key
                if const_expr(cute.rank(arguments.mass) == 3):
                    arguments.mass[work.b, work.part, place] = whole
                else:
                    arguments.mass[work.part, place] = whole


@cute.jit
def steps(
    body: cutlass.Constexpr[Callable[..., None]],
    queries: QueryTiles,
    first: Any,
    end: Any,
    state: pipeline.PipelineState,
    masked: cutlass.Constexpr[bool],
) -> pipeline.PipelineState:
    """Takes the tiles from `first` to before `end`, which all need the mask, or none."""
    for i in cutlass.range(first, end, unroll=1):
        body(state, query_tile_at(queries, i), masked)
        state.advance()
    return state


def total(values: list[Any]) -> Any:
    """Sum of values two by two: a long chain of additions would be waited for."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
