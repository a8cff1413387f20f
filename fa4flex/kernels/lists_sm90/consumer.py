"""A consumer warpgroup: that of few query rows, over keys each of which has an index of its own. Threads are
counted over all of them, and a tile's rows go from one to the next."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.fragment import multiply
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.products import ROWS, Products, products_of
from fa4flex.kernels.common.softmax import rescale, take_maxima
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.decode_sm90 import consumer as base
from fa4flex.kernels.decode_sm90.consumer import Mine, row_of
from fa4flex.kernels.lists.fragment import Found, ListFragment, keys_of
from fa4flex.kernels.lists.tiles import ListTile, Slice, Walk, own_of
from fa4flex.kernels.lists_sm90.config import Config
from fa4flex.kernels.lists_sm90.epilogue import Epilogue
from fa4flex.kernels.lists_sm90.resources import Shared


@dataclass(frozen=True)
class Begun:
    """Scores of a tile, as accumulators and by row; its keys; by row, what the variant computes without
    scores; and whether the warp's rows see all keys, None where that is not asked."""

    scores: cute.Tensor
    grids: list[cute.Tensor]
    found: Found
    early: list[Any]
    whole: Boolean | None


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
        copy_rows(queries, tile.q_offset, mine, shared.q[None, None, group], lane)

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
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        self.walk(Whole(products, rows, shared, pipes), tile, walk, state)
        self.epilogue.run(arguments, tile, products, rows, lane)

    @cute.jit
    def walk(
        self, whole: cutlass.Constexpr[Whole], tile: ListTile, walk: Walk, k_state: pipeline.PipelineState
    ) -> None:
        """All tiles of keys: scores, softmax and values in turn."""
        products, rows, pipes = whole.products, whole.rows, whole.pipes
        v_state = k_state.clone()
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            found = self.found(rows[0], whole.shared, pipes, k_state, i >= walk.listed)
            scores, grids = self.scores_of(products, rows, pipes, found, k_state)
            if const_expr(not self.hooks.elementwise):
                self.take_maxima(products.out, rows, grids)
            self.to_values(products, rows, scores, grids)
            self.issue_values(whole, v_state)
            self.take_values(whole, v_state)
            k_state.advance()
            v_state.advance()

    def issue_values(self, whole: Whole, v_state: pipeline.PipelineState) -> None:
        """Issue the product with a tile of values, when they are there."""
        whole.pipes.v.consumer_wait(v_state)
        products = whole.products
        v = products.v[None, None, None, v_state.index]
        multiply(products.values, products.out, products.p, v, True)

    def take_values(self, whole: Whole, v_state: pipeline.PipelineState) -> None:
        """Wait for that product, and give the tile back."""
        warpgroup.wait_group(0)
        whole.pipes.v.consumer_release(v_state)

    def to_values(self, products: Products, rows: tuple[Mine, ...], scores: Any, grids: list) -> None:
        """Probabilities, as their product takes them."""
        self.probabilities(rows, grids)
        base.narrow(base.as_operand(scores), products.p)

    def row(self, arguments: Arguments, tile: Any, number: Int32, lane: Int32) -> Mine:
        mine = super().row(arguments, tile, number, lane)
        return listed_row(mine, arguments, tile, self.config, self.hooks)

    def found(
        self, mine: Mine, shared: Shared, pipes: Pipes, state: pipeline.PipelineState, beside: Any
    ) -> Found:
        """Keys of this thread's columns of a tile."""
        cute.arch.mbarrier_wait(pipes.ids_full + state.index, state.phase)
        fragment = mine.fragment
        told = [
            keys_of(shared.ids[None, n, state.index], fragment.first_column, fragment.columns)
            for n in range(self.config.told)
        ]
        arrive_once(pipes.ids_empty + state.index)
        return Found(told[0], beside if self.config.beside else None, *told[1:])

    def scores_of(
        self,
        products: Products,
        rows: tuple[Mine, ...],
        pipes: Pipes,
        found: Found,
        state: pipeline.PipelineState,
    ) -> tuple[cute.Tensor, list[cute.Tensor]]:
        """Modified scores of one tile, as accumulators and by row."""
        begun = self.issue_scores(products, rows, pipes, found, state)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(state)
        self.modify_all(rows, begun)
        return begun.scores, begun.grids

    def issue_scores(
        self,
        products: Products,
        rows: tuple[Mine, ...],
        pipes: Pipes,
        found: Found,
        state: pipeline.PipelineState,
    ) -> Begun:
        """Numbers that the variant computes without scores, and their product, which is issued."""
        shape = products.scores.partition_shape_C((ROWS, self.config.tile_n))
        scores = cute.make_rmem_tensor(shape, Float32)
        grids, early, seen = [row_of(scores, r) for r in range(len(rows))], [], []
        at: Any = found
        for mine, grid in zip(rows, grids):
            mine.fragment.start(self.hooks, grid, at, True)
            allowed = mine.fragment.allowed(self.hooks, at)
            early.append((mine.fragment.prepare(self.hooks, at, True), allowed))
            fragment: Any = mine.fragment
            seen.append(fragment.sees_all(found, allowed))
        pipes.k.consumer_wait(state)
        k = products.k[None, None, None, state.index]
        multiply(products.scores, scores, products.q, k, self.hooks.start is not None)
        whole = None
        if seen[0] is not None:
            whole = cute.arch.vote_all_sync(functools.reduce(operator.and_, seen))
        return Begun(scores, grids, found, early, whole)

    def modify_all(self, rows: tuple[Mine, ...], begun: Begun) -> None:
        """q.k becomes what the softmax is taken of."""
        for mine, grid, (known, _) in zip(rows, begun.grids, begun.early):
            mine.fragment.modify(self.hooks, grid, known)
        if begun.whole is None:
            mask_rows(rows, begun)
        else:
            mask_some(rows, begun, begun.whole)


@cute.jit
def mask_some(
    rows: cutlass.Constexpr[tuple[Mine, ...]], begun: cutlass.Constexpr[Begun], whole: Boolean
) -> None:
    """Most tiles of a list have nothing to mask."""
    if not whole:
        mask_rows(rows, begun)


def mask_rows(rows: tuple[Mine, ...], begun: Begun) -> None:
    at: Any = begun.found
    for mine, grid, (_, allowed) in zip(rows, begun.grids, begun.early):
        mine.fragment.mask(grid, at, allowed)


def listed_row(mine: Mine, arguments: Arguments, tile: ListTile, config: Any, hooks: Any) -> Mine:
    """A row, over keys each of which has an index of its own. config: has `beside` and `united`."""
    own = own_of(mine.row.q, tile, arguments, config)
    return replace(mine, fragment=ListFragment.of(mine.fragment, *own, hooks))


@dataclass(frozen=True)
class Whole:
    """State of a warpgroup for all tiles of keys."""

    products: Products
    rows: tuple[Mine, ...]
    shared: Shared
    pipes: Pipes

    @property
    def softmaxes(self) -> tuple[Any, ...]:
        return tuple(mine.softmax for mine in self.rows)


class SharingConsumer(Consumer):
    """One of two, beside which no other block is on a multiprocessor: scores of a tile are multiplied before
    the values of the one before, so that much of its softmax runs under a product of its own."""

    @cute.jit
    def walk(
        self, whole: cutlass.Constexpr[Whole], tile: ListTile, walk: Walk, state: pipeline.PipelineState
    ) -> None:
        if tile.first < tile.last:
            k_state, v_state = self.first(whole, tile.first >= walk.listed, state)
            for i in cutlass.range(tile.first + 1, tile.last, unroll=1):
                k_state, v_state = self.step(whole, i >= walk.listed, (k_state, v_state))
            self.issue_values(whole, v_state)
            self.take_values(whole, v_state)

    @cute.jit
    def first(
        self, whole: cutlass.Constexpr[Whole], beside: Boolean, k_state: pipeline.PipelineState
    ) -> States:
        """Scores and probabilities of the first tile. There is no output yet that maxima could rescale."""
        products, rows, pipes = whole.products, whole.rows, whole.pipes
        found = self.found(rows[0], whole.shared, pipes, k_state, beside)
        scores, grids = self.scores_of(products, rows, pipes, found, k_state)
        if const_expr(not self.hooks.elementwise):
            take_maxima(whole.softmaxes, tuple(grids))
        self.to_values(products, rows, scores, grids)
        v_state = k_state.clone()
        k_state.advance()
        return k_state, v_state

    @cute.jit
    def step(self, whole: cutlass.Constexpr[Whole], beside: Boolean, states: States) -> States:
        """Scores of this tile, and values of the one before. Maxima are found under the second product."""
        (k_state, v_state), products, rows, pipes = states, whole.products, whole.rows, whole.pipes
        found = self.found(rows[0], whole.shared, pipes, k_state, beside)
        begun = self.issue_scores(products, rows, pipes, found, k_state)
        self.issue_values(whole, v_state)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self.modify_all(rows, begun)
        raised = Boolean(False)
        if const_expr(not self.hooks.elementwise):
            raised = take_maxima(whole.softmaxes, tuple(begun.grids))
        self.take_values(whole, v_state)
        self.to_values(products, rows, begun.scores, begun.grids)
        if const_expr(not self.hooks.elementwise):  # noqa: SIM102  one is decided when compiled, one when run
            if raised:
                rescale(products.out, whole.softmaxes)
        # Values take the same course through their ring as keys, one tile behind.
        v_state = k_state.clone()
        k_state.advance()
        return k_state, v_state
