"""The consumer warpgroup: products by wgmma, softmax in registers between them.

Each thread has parts of two rows. Rows may be of different heads, so that all that depends on the head is
kept per row; where a variant does not look at the head, both rows' are the same values. Products and softmax
take turns: a multiprocessor waits for memory most of the time, and another block's run meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.ahead import Held
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, sync
from fa4flex.kernels.common.fragment import as_operand, multiply, narrow, rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.packed_rows import Part, Row, Tile, first_full, place_of, tile_of
from fa4flex.kernels.common.pointwise import Fragment, prepare_rows, quad_fragment
from fa4flex.kernels.common.products import ROWS, Mmas, Products, products_of, zero_past
from fa4flex.kernels.common.softmax import OnlineSoftmax, maxima, passed, raise_maxima, rescale, running
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.common.weights import weights_of
from fa4flex.kernels.decode_sm90.config import Config
from fa4flex.kernels.decode_sm90.epilogue import Epilogue
from fa4flex.kernels.decode_sm90.resources import Shared
from fa4flex.kernels.decode_sm90.roles import WRITTEN

OFFSETS = (0, 8)
"""A thread's rows, from the first on."""


@dataclass(frozen=True)
class Mine:
    """One of a thread's rows: what stays the same over its key tiles. held: elements that scores of the next
    tile start from, where these are read a tile ahead."""

    row: Row
    fragment: Fragment
    softmax: OnlineSoftmax
    held: Held | None


@dataclass(frozen=True)
class Keys:
    """A key tile, whether it is masked, and the tile after it, or the last again."""

    tile: Int32
    masked: bool
    following: Int32 | None = None


class Consumer:
    epilogue: Any

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.width = config.tile_n
        """Keys of a product's scores, of which a lane has a quarter."""
        self.epilogue = Epilogue(config, hooks)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: cutlass.Constexpr[Mmas],
    ) -> None:
        lane = cute.arch.thread_idx()[0] - 128
        tile = tile_of(part, arguments, self.hooks, self.config)
        self.queries(arguments, tile, shared, lane)
        products = self.products(mma, shared, lane)
        rows = self.rows(arguments, tile, lane)
        for row in rows:
            row.softmax.state.clear()
        products.out.fill(0.0)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        v_state = k_state.clone()
        self.read_starts(rows, tile_at(tile.keys, tile.first), True)
        full = first_full(tile)
        for i in cutlass.range(tile.first, full, unroll=1):
            keys = self.keys_at(tile, i, True)
            k_state, v_state = self.step(products, rows, pipes, keys, (k_state, v_state))
        for i in cutlass.range(full, tile.last, unroll=1):
            keys = self.keys_at(tile, i, False)
            k_state, v_state = self.step(products, rows, pipes, keys, (k_state, v_state))
        self.epilogue.run(arguments, tile, products, rows, lane)

    def keys_at(self, tile: Tile, i: Int32, masked: bool) -> Keys:
        following = None
        if self.reads_ahead:
            following = tile_at(tile.keys, cutlass.min(i + 1, tile.last - 1))
        return Keys(tile_at(tile.keys, i), masked, following)

    def read_starts(self, rows: tuple[Mine, ...], key_tile: Int32, guard: bool) -> None:
        """Read what the scores of this tile will start from. guard: of keys, there may be fewer than the tile
        has, or none."""
        for mine in rows:
            if mine.held is not None:
                mine.fragment.read_start(self.hooks, key_tile * self.config.tile_n, guard, mine.held)

    @cute.jit
    def queries(
        self, arguments: Arguments, tile: Tile, shared: cutlass.Constexpr[Shared], lane: Int32
    ) -> None:
        """All rows of the tile to shared memory."""
        queries = arguments.q[tile.b, None, None, None]
        copy_rows(queries, Int32(0), tile, shared.q[None, None, 0], lane)
        sync(WRITTEN)

    def products(self, mma: Mmas, shared: Shared, lane: Int32) -> Products:
        tiles = shared.q[None, None, 0], shared.k, shared.v
        return products_of(mma, tiles, (self.config.tile_n, self.config.head_dim_v), lane)

    def rows(self, arguments: Arguments, tile: Tile, lane: Int32) -> tuple[Mine, ...]:
        """Lane l of the warpgroup holds rows l / 4 and l / 4 + 8 of its warp's 16."""
        number = lane // 32 * 16 + lane % 32 // 4
        return tuple(self.row(arguments, tile, number + offset, lane) for offset in OFFSETS)

    def row(self, arguments: Arguments, tile: Tile, number: Int32, lane: Int32) -> Mine:
        row = tile.row(number)
        at = place_of(row, tile, arguments, self.hooks)
        terms = prepare_rows(self.hooks, at, row.q, (0,))
        state = running(1, self.config.statistics)
        softmax = weights_of(self.hooks, at, self.config.rescale_threshold, state)
        fragment = quad_fragment(at, terms, row.q, self.width, lane)
        return Mine(row, fragment, softmax, Held() if self.reads_ahead else None)

    @property
    def reads_ahead(self) -> bool:
        """True if scores start from elements that are read a tile ahead: the same number for each tile."""
        start = self.hooks.start
        return self.config.starts_ahead and start is not None and not start.folds and not start.branches

    @cute.jit
    def step(
        self,
        products: cutlass.Constexpr[Products],
        rows: cutlass.Constexpr[tuple[Mine, ...]],
        pipes: cutlass.Constexpr[Pipes],
        keys: cutlass.Constexpr[Keys],
        states: States,
    ) -> States:
        """Scores, softmax and values of one key tile."""
        k_state, v_state = states
        self.softmax(products, rows, pipes, keys, k_state)
        pipes.v.consumer_wait(v_state)
        if const_expr(keys.masked):
            self.clear_past_end(products, rows[0], keys.tile * self.config.tile_n, v_state)
        multiply(products.values, products.out, products.p, products.v[None, None, None, v_state.index], True)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    def scores(
        self,
        products: Products,
        rows: tuple[Mine, ...],
        pipes: Pipes,
        keys: Keys,
        k_state: pipeline.PipelineState,
    ) -> tuple[cute.Tensor, list[cute.Tensor]]:
        """Modified scores of one key tile, as accumulators and by row."""
        scores, grids, early = self.begin(products, rows, keys.tile, keys.masked)
        if keys.following is not None:
            self.read_starts(rows, keys.following, keys.masked)
        pipes.k.consumer_wait(k_state)
        k = products.k[None, None, None, k_state.index]
        multiply(products.scores, scores, products.q, k, self.hooks.start is not None)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.modify(rows, grids, early, keys.tile, keys.masked)
        return scores, grids

    def softmax(
        self,
        products: Products,
        rows: tuple[Mine, ...],
        pipes: Pipes,
        keys: Keys,
        k_state: pipeline.PipelineState,
    ) -> None:
        """Scores and probabilities of one key tile."""
        scores, grids = self.scores(products, rows, pipes, keys, k_state)
        if not self.hooks.elementwise:
            self.take_maxima(products.out, rows, grids)
        self.probabilities(rows, grids)
        narrow(as_operand(scores), products.p)

    def begin(
        self, products: Products, rows: tuple[Mine, ...], key_tile: Int32, masked: bool
    ) -> tuple[cute.Tensor, list, list]:
        """Scores to accumulate into, the same row by row, and what the variant computes without them: terms
        of the scores, and the bits of what a mask that is asked allows."""
        kv_first = key_tile * self.config.tile_n
        shape = products.scores.partition_shape_C((ROWS, self.config.tile_n))
        scores = cute.make_rmem_tensor(shape, Float32)
        grids = [row_of(scores, r) for r in range(len(rows))]
        early = []
        for mine, grid in zip(rows, grids):
            if mine.held is None:
                mine.fragment.start(self.hooks, grid, kv_first, masked)
            else:
                mine.fragment.start_held(self.hooks, grid, kv_first, mine.held)
            allowed = mine.fragment.allowed(self.hooks, kv_first) if masked else None
            early.append((mine.fragment.prepare(self.hooks, kv_first, masked), allowed))
        return scores, grids, early

    def modify(self, rows: tuple[Mine, ...], grids: list, early: list, key_tile: Int32, masked: bool) -> None:
        """q.k becomes what the softmax is taken of: the variant's score, or -inf."""
        for mine, grid, (known, allowed) in zip(rows, grids, early):
            mine.fragment.modify(self.hooks, grid, known)
            if masked:
                mine.fragment.mask(grid, key_tile * self.config.tile_n, allowed)

    @cute.jit
    def probabilities(
        self, rows: cutlass.Constexpr[tuple[Mine, ...]], grids: cutlass.Constexpr[list]
    ) -> None:
        for mine, grid in zip(rows, grids):
            mine.softmax.exponentiate(grid)

    @cute.jit
    def take_maxima(
        self,
        out: cute.Tensor,
        rows: cutlass.Constexpr[tuple[Mine, ...]],
        grids: cutlass.Constexpr[list],
    ) -> None:
        """Raise the running maxima to this tile's, and rescale the output, where a score passes a ceiling."""
        softmaxes = [mine.softmax for mine in rows]
        found = maxima(softmaxes, grids)
        if passed(softmaxes, found):
            raise_maxima(softmaxes, found)
            rescale(out, softmaxes)

    @cute.jit
    def clear_past_end(
        self,
        products: cutlass.Constexpr[Products],
        mine: cutlass.Constexpr[Mine],
        kv_first: Int32,
        v_state: pipeline.PipelineState,
    ) -> None:
        """Zero the values past the end of a sequence. Dense tensors end where TMA fills in zeros itself."""
        if const_expr(self.config.clears):
            end = mine.fragment.at.kv_len - kv_first
            if end < self.config.tile_n:
                zero_past(products.v_shared[None, None, v_state.index], end, Int32(WRITTEN.at()))


def row_of(scores: cute.Tensor, r: int) -> cute.Tensor:
    """A row of an accumulator as (1, column): the same registers."""
    grid = rows_and_columns(scores)
    row = grid[r, None]
    return cute.make_tensor(row.iterator, cute.prepend(row.layout, cute.make_layout(1)))
