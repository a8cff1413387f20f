"""A consumer warpgroup: that of few query rows, over keys each of which has an index of its own. Threads are
counted over all of them, and a tile's rows go from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.fragment import multiply
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.products import ROWS, Products, products_of
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.decode_sm90 import consumer as base
from fa4flex.kernels.decode_sm90.consumer import Mine, row_of
from fa4flex.kernels.lists_sm90.config import Config
from fa4flex.kernels.lists_sm90.epilogue import Epilogue
from fa4flex.kernels.lists_sm90.fragment import Found, ListFragment, keys_of
from fa4flex.kernels.lists_sm90.resources import Shared
from fa4flex.kernels.lists_sm90.tiles import ListTile, Slice, Walk, near


class Consumer(base.Consumer):
    config: Config  # type: ignore[assignment]

    def __init__(self, config: Config, hooks: Any) -> None:
        super().__init__(config, hooks)  # type: ignore[arg-type]  # it has what is read of one
        self.epilogue = Epilogue(config, hooks)  # type: ignore[arg-type]

    @cute.jit
    def bring_queries(
        self, arguments: Arguments, tile: ListTile, shared: cutlass.Constexpr[Shared], thread: Int32
    ) -> None:
        """The warpgroup's rows to shared memory. Threads meet after it, as they do when entries are known."""
        group, lane = self.place(thread)
        queries = arguments.q
        if const_expr(cute.rank(arguments.q) == 4):
            queries = arguments.q[tile.b, None, None, None]
        mine = Slice(tile, group * ROWS)
        copy_rows(queries, tile.q_offset, mine, shared.q[None, None, group], lane)  # type: ignore[arg-type]

    def place(self, thread: Int32) -> tuple[Int32, Int32]:
        """Number of the warpgroup, and of the thread in it."""
        if self.config.consumers == 1:
            return Int32(0), thread
        return cute.arch.make_warp_uniform(thread // 128), thread % 128

    def products(self, mma: tuple[Any, Any], shared: Shared, thread: Int32) -> Products:  # type: ignore[override]
        group, lane = self.place(thread)
        tiles = shared.q[None, None, group], shared.k, shared.v
        return products_of(mma, tiles, (self.config.tile_n, self.config.head_dim_v), lane)

    @cute.jit
    def visit(
        self,
        arguments: Arguments,
        tile: ListTile,
        walk: Walk,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: cutlass.Constexpr[tuple[cute.TiledMma, cute.TiledMma]],
    ) -> None:
        """All tiles of keys, and the results."""
        lane = cute.arch.thread_idx()[0] - 128
        products = self.products(mma, shared, lane)
        rows = self.rows(arguments, tile, lane)  # type: ignore[arg-type]
        for row in rows:
            row.softmax.state.clear()
        products.out.fill(0.0)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        v_state = k_state.clone()
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            found = self.found(rows[0], shared, pipes, k_state, i >= walk.listed)
            scores, grids = self.scores_of(products, rows, pipes, found, k_state)
            if const_expr(not self.hooks.elementwise):
                self.take_maxima(products.out, rows, grids)
            self.to_values(products, rows, scores, grids)
            pipes.v.consumer_wait(v_state)
            v = products.v[None, None, None, v_state.index]
            multiply(products.values, products.out, products.p, v, True)
            warpgroup.wait_group(0)
            pipes.v.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
        self.epilogue.run(arguments, tile, products, rows, lane)

    def to_values(self, products: Products, rows: tuple[Mine, ...], scores: Any, grids: list) -> None:
        """Probabilities, as their product takes them."""
        self.probabilities(rows, grids)
        base.narrow(base.as_operand(scores), products.p)

    def row(self, arguments: Arguments, tile: Any, number: Int32, lane: Int32) -> Mine:
        mine = super().row(arguments, tile, number, lane)
        seen = near(mine.row.q, tile, arguments) if self.config.beside else None
        return replace(mine, fragment=ListFragment.of(mine.fragment, seen, self.hooks))

    def found(
        self, mine: Mine, shared: Shared, pipes: Pipes, state: pipeline.PipelineState, beside: Any
    ) -> Found:
        """Keys of this thread's columns of a tile."""
        cute.arch.mbarrier_wait(pipes.ids_full + state.index, state.phase)
        fragment = mine.fragment
        keys = keys_of(shared.ids[None, state.index], fragment.first_column, fragment.columns)
        arrive_once(pipes.ids_empty + state.index)
        return Found(keys, beside if self.config.beside else None)

    def scores_of(
        self,
        products: Products,
        rows: tuple[Mine, ...],
        pipes: Pipes,
        found: Found,
        state: pipeline.PipelineState,
    ) -> tuple[cute.Tensor, list[cute.Tensor]]:
        """Modified scores of one tile, as accumulators and by row."""
        shape = products.scores.partition_shape_C((ROWS, self.config.tile_n))
        scores = cute.make_rmem_tensor(shape, Float32)
        grids, early = [row_of(scores, r) for r in range(len(rows))], []
        at: Any = found
        for mine, grid in zip(rows, grids):
            mine.fragment.start(self.hooks, grid, at, True)
            allowed = mine.fragment.allowed(self.hooks, at)
            early.append((mine.fragment.prepare(self.hooks, at, True), allowed))
        pipes.k.consumer_wait(state)
        k = products.k[None, None, None, state.index]
        multiply(products.scores, scores, products.q, k, self.hooks.start is not None)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(state)
        for mine, grid, (known, allowed) in zip(rows, grids, early):
            mine.fragment.modify(self.hooks, grid, known)
            mine.fragment.mask(grid, at, allowed)
        return scores, grids
