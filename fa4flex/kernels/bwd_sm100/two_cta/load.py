"""The warp that brings keys and values once, then queries and output gradients with their rows' numbers.

Each CTA of a pair brings its own part, and the first one's barriers count both. Operands that products take
half of by rows and half of by columns come twice: by rows, and transposed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, cute, pipeline

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.resources import Products
from fa4flex.kernels.bwd_sm100.two_cta.resources import Shared
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    KeyWork,
    query_tile_at,
    rows_of,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.transfer import Views, load_stage

BY_COLUMNS = (0, None)
"""Tiles of transposes follow each other along the second axis: a CTA's columns of a head, of each in turn."""


class Transfers(NamedTuple):
    """q, k, v, dout: as of one CTA alone; with _t, the first two modes are exchanged."""

    q: Any
    k: Any
    v: Any
    dout: Any
    q_t: Any
    k_t: Any
    dout_t: Any


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
        q, k, v, dout, q_t, k_t, dout_t = transfers
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.do_stages)
        # The first dQ is the last to be multiplied of a first step, and what it takes of K comes behind it.
        waiting = self.scheduler.steps(work, arguments) > 0
        if waiting:
            self.once(k, self.keys(k, shared.k, products.scores, products.scores_tile, work), pipes.k_full)
            self.once(v, self.keys(v, shared.v, products.dprob, products.dprob_tile, work), pipes.v_full)
        for g in cutlass.range(work.group, unroll=1):
            h = work.kv_head * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            at = (h, work.b)
            q_rows, do_rows = (self.rows(x, work.q_offset, work.q_len, at) for x in (q, dout))
            q_columns, do_columns = (
                self.rows(x, work.q_offset, work.q_len, at, axis=1) for x in (q_t, dout_t)
            )
            q_views = self.views(q_rows, q, shared.q, products.scores, products.scores_tile)
            q_t_views = self.views(q_columns, q_t, shared.q_t, products.dk, products.dk_tile, BY_COLUMNS)
            do_views = self.views(do_rows, dout, shared.dout, products.dprob, products.dprob_tile)
            do_t_views = self.views(
                do_columns, dout_t, shared.dout_t, products.dv, products.dv_tile, BY_COLUMNS
            )
            lse2, delta = rows_of(arguments.lse2, work, h), rows_of(arguments.delta, work, h)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                load_stage(q, pipes.q, q_state, q_views, tile)
                self.numbers(lse2, shared.lse2, (pipes.lse2_full, pipes.lse2_empty), q_state, tile)
                load_stage(dout, pipes.dout, do_state, do_views, tile)
                self.numbers(delta, shared.delta, (pipes.delta_full, pipes.delta_empty), do_state, tile)
                load_stage(dout_t, pipes.dout_t, do_state, do_t_views, tile)
                # Free later than all others: the products that come first have been asked for by now.
                load_stage(q_t, pipes.q_t, q_state, q_t_views, tile)
                q_state.advance()
                do_state.advance()
                if waiting:
                    views = self.keys_by_columns(k_t, shared.k_t, products, work)
                    self.once(k_t, views, pipes.k_t_full)
                    waiting = Boolean(False)

    def keys_by_columns(self, transfer: Any, shared: cute.Tensor, products: Products, work: KeyWork) -> Views:
        """This CTA's columns of all the pair's keys, as the second operand of a product."""
        at = work.kv_head, work.b
        whole = self.rows(transfer, work.kv_offset, work.kv_len, at, axis=1)
        to_shared, tiles = self.views(whole, transfer, shared, products.dq, products.dq_tile, BY_COLUMNS)
        return to_shared[None, 0], tiles[None, work.tile]

    def once(self, transfer: Any, views: Views, full: cute.Pointer) -> None:
        to_shared, from_global = views
        self.cluster.expect(full, cute.size_in_bytes(to_shared.element_type, to_shared.layout))
        cute.copy(transfer.atom, from_global, to_shared, tma_bar_ptr=full)
