"""The warp that adds each warpgroup's part of dQ to global memory."""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute

from fa4flex.codegen.kernels.bwd_sm90.config import Config
from fa4flex.codegen.kernels.bwd_sm90.parts import Shared, dq_empty, dq_full
from fa4flex.codegen.kernels.common.backward import (
    BackwardArguments,
    BackwardCourse,
    KeyWork,
    await_turn,
    pass_turn,
    query_tile_at,
    rows_of,
)
from fa4flex.codegen.kernels.common.transfer import add_bulk

THREADS = 128 + 32
"""A warpgroup and this warp."""


class Writer:
    def __init__(self, config: Config, course: BackwardCourse) -> None:
        self.config = config
        self.course = course

    @cute.jit
    def run(self, arguments: BackwardArguments, work: KeyWork, shared: cutlass.Constexpr[Shared]) -> None:
        config = self.config
        rows, columns = config.dq_shape
        part = rows * columns
        group = self.course.group(arguments)
        for w in cutlass.range_constexpr(config.consumers):
            cute.arch.barrier_arrive(barrier_id=dq_empty(w, 0), number_of_threads=THREADS)
        stage = Int32(0)
        for g in cutlass.range(group, unroll=1):
            h = work.kv_head * group + g
            queries = self.course.queries(work, h, arguments)
            sums = rows_of(arguments.dq_sum, work, h, config.head_dim)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                whole = cute.local_tile(sums, (part,), (tile * config.consumers,))
                if const_expr(config.deterministic):
                    counter = await_turn(arguments, work, h, queries, i, config)
                for w in cutlass.range_constexpr(config.consumers):
                    cute.arch.barrier(barrier_id=dq_full(w, stage), number_of_threads=THREADS)
                    with cute.arch.elect_one():
                        add_bulk(shared.dq[None, w, stage], whole.iterator + w * part, part)
                    cute.arch.cp_async_bulk_commit_group()
                stage = (stage + 1) % config.dq_stages
                # Of its other stage, all but this step's additions have been read.
                for w in cutlass.range_constexpr(config.consumers):
                    pending = config.consumers if config.dq_stages == 2 else config.consumers - 1 - w
                    cute.arch.cp_async_bulk_wait_group(pending, read=True)
                    cute.arch.barrier_arrive(barrier_id=dq_empty(w, stage), number_of_threads=THREADS)
                if const_expr(config.deterministic):
                    cute.arch.cp_async_bulk_wait_group(0)
                    pass_turn(counter)
        cute.arch.cp_async_bulk_wait_group(0)
