"""The warp that brings keys and values once, then output gradients and queries with their rows' numbers.

Shared memory holds one tile of each. That of dO is free first, and what comes while dK and dQ are multiplied
does not hold up the next scores, which read twice as much. So dO comes before Q, and values, which the second
product takes, after the first tile of both.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, cute, pipeline

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.load import Transfers
from fa4flex.kernels.bwd_sm100.resources import Products, Shared
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    KeyWork,
    query_tile_at,
    rows_of,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.transfer import load_once, load_stage


class Load(base.Load):
    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
    ) -> None:
        config = self.config
        q, k, v, dout = transfers
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.do_stages)
        waiting = self.scheduler.steps(work, arguments) > 0
        if waiting:
            load_once(k, self.keys(k, shared.k, products.scores, products.scores_tile, work), pipes.k_full)
        for g in cutlass.range(work.group, unroll=1):
            h = work.kv_head * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            q_rows, do_rows = (self.rows(x, work.q_offset, work.q_len, (h, work.b)) for x in (q, dout))
            q_views = self.views(q_rows, q, shared.q, products.scores, products.scores_tile)
            do_views = self.views(do_rows, dout, shared.dout, products.dprob, products.dprob_tile)
            lse2, delta = rows_of(arguments.lse2, work, h), rows_of(arguments.delta, work, h)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                load_stage(dout, pipes.dout, do_state, do_views, tile)
                self.numbers(delta, shared.delta, (pipes.delta_full, pipes.delta_empty), do_state, tile)
                do_state.advance()
                load_stage(q, pipes.q, q_state, q_views, tile)
                self.numbers(lse2, shared.lse2, (pipes.lse2_full, pipes.lse2_empty), q_state, tile)
                q_state.advance()
                if waiting:
                    views = self.keys(v, shared.v, products.dprob, products.dprob_tile, work)
                    load_once(v, views, pipes.v_full)
                    waiting = Boolean(False)
