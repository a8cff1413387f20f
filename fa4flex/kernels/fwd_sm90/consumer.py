"""A consumer warpgroup: 64 query rows; products by wgmma, softmax in registers between them.

While a warpgroup computes the softmax of one tile of scores, the tensor cores multiply the next tile's scores
and the last tile's output (FlashAttention-3, Shah et al. 2024, section 3.2), and warpgroups take turns at
issuing products, so that one's softmax runs under another's products (section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.dropout import RowDropout
from fa4flex.kernels.common.fragment import (
    as_operand,
    compute_before,
    computed_once,
    multiply,
    narrow,
    rows_and_columns,
)
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.keys import KeyTiles, RowEnds, row_ends, tile_at
from fa4flex.kernels.common.pointwise import Early, Fragment, Words, prepare_rows, quad_fragment
from fa4flex.kernels.common.products import ROWS, Products, products_of, zero_past
from fa4flex.kernels.common.softmax import OnlineSoftmax, Running, rescale, running, take_maxima
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import States, Transfers, warp_uniform
from fa4flex.kernels.common.weights import weights_of
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.epilogue import Epilogue
from fa4flex.kernels.fwd_sm90.resources import QueryRing, Shared
from fa4flex.kernels.fwd_sm90.roles import TURN, WRITTEN
from fa4flex.kernels.fwd_sm90.rows import rows_of


@dataclass(frozen=True)
class Mine:
    """A warpgroup's part of a tile of queries: its products, and running numbers of a thread's rows; hook
    arguments and query of the first of these; the place of its queries in shared memory, and the phase of
    their barriers."""

    transfers: Transfers
    shared: Shared
    pipes: Pipes
    products: Products
    state: Running
    work: Work
    at: At
    query: Int32
    keys: KeyTiles
    place: Any
    phase: Int32
    lane: Int32
    group: Int32


@dataclass(frozen=True)
class Tile:
    """Constants over the key tiles of one query tile."""

    pipes: Pipes
    products: Products
    group: Int32
    fragment: Fragment
    softmax: OnlineSoftmax
    dropout: RowDropout | None


@dataclass(frozen=True)
class Begun:
    """Scores of one key tile, as accumulators and as a (row, column) grid, and what does not need them."""

    scores: cute.Tensor
    grid: cute.Tensor
    kv_first: Int32
    early: Early | None
    allowed: Words | None


class Consumer:
    def __init__(self, config: Config, hooks: Hooks, scheduler: TileScheduler) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler
        self.ring = QueryRing(config.q_stages)
        self.epilogue = Epilogue(config, hooks)
        self.rows = rows_of(config)
        self.starts = hooks.start is not None
        """True if products of queries and keys are added to what the variant says."""

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: cutlass.Constexpr[tuple[cute.TiledMma, cute.TiledMma]],
    ) -> None:
        thread = cute.arch.thread_idx()[0] - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 128
        every, state = self.products(mma, shared, lane, group), self.running()
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        v_state = k_state.clone()
        self.open_turns(group)

        @cute.jit
        def attend(work: Work, phase: Int32, states: States) -> States:
            turn = self.ring.turn(phase, states)
            place = self.ring.place(self.row_group(group), turn)
            at = self.scheduler.place(work, grid, arguments)
            keys = self.scheduler.keys(at, work, arguments)
            first_row = work.tile * self.config.tile_m + self.row_group(group) * ROWS
            row = first_row + lane // 32 * 16 + lane % 32 // 4
            own, query = self.rows.place(work, row)
            if const_expr(self.config.group > 1):
                at = self.scheduler.place_of(own, grid, arguments)
            products = self.of_queries(every, mma, shared.q, lane, place)
            mine = Mine(
                transfers,
                shared,
                pipes,
                products,
                state,
                work,
                at,
                query,
                keys,
                place,
                turn.phase,
                lane,
                group,
            )
            both = states[0], states[1]
            if const_expr(not self.config.passes):
                both = self.attend(mine, arguments, both)
            elif first_row < self.rows.count(work):
                both = self.attend(mine, arguments, warp_uniform(both))
            else:
                both = self.pass_by(mine, both)
            return self.ring.carry(phase, states, both)

        begun = self.ring.open((k_state, v_state))
        self.walk(attend, arguments, grid, shared, pipes, begun)
        self.epilogue.drain()

    @cute.jit
    def attend(self, mine: cutlass.Constexpr[Mine], arguments: Arguments, states: States) -> States:
        """All keys of a warpgroup's rows, and what they give."""
        pipes, keys = mine.pipes, mine.keys
        tile = self.tile(mine, row_ends(arguments.tables, mine.at, self.config.row_ends))
        tile = self.told(tile, mine, arguments)
        mine.products.out.fill(0.0)
        cute.arch.mbarrier_wait(pipes.q_full + mine.place, mine.phase)
        states = self.first(tile, tile_at(keys, Int32(0)), states[0])

        @cute.jit
        def steps(first: Any, end: Any, states: States, masked: cutlass.Constexpr[bool]) -> States:
            k_state, v_state = states
            for i in cutlass.range(first, end, unroll=1):
                k_state, v_state = self.step(tile, tile_at(keys, i), (k_state, v_state), masked)
            return k_state, v_state

        if const_expr(self.config.one_body):
            states = steps(1, keys.count, states, True)
        else:
            states = steps(1, keys.masked_count, states, True)
            states = steps(cutlass.max(keys.masked_count, 1), keys.count, states, False)
        if const_expr(self.config.frees_queries):
            self.release_queries(pipes, mine.place)
        k_state, v_state = states
        self.last(tile, v_state)
        self.epilogue.run(arguments, mine, tile, self.storing_lane(mine.lane, tile))
        if const_expr(not self.config.frees_queries):
            self.release_queries(pipes, mine.place)
        return k_state, v_state

    @cute.jit
    def pass_by(self, mine: cutlass.Constexpr[Mine], states: States) -> States:
        """The same barriers, of a warpgroup all of whose rows are past the last: it computes nothing, and the
        others have the tensor cores."""
        k_state, pipes = states[0], mine.pipes
        cute.arch.mbarrier_wait(pipes.q_full + mine.place, mine.phase)
        pipes.k.consumer_wait(k_state)
        pipes.k.consumer_release(k_state)
        v_state = k_state.clone()
        k_state.advance()
        for _ in cutlass.range(1, mine.keys.count, unroll=1):
            pipes.k.consumer_wait(k_state)
            self.take_turn(mine.group)
            pipes.v.consumer_wait(v_state)
            self.give_turn(self.next(mine.group))
            pipes.k.consumer_release(k_state)
            pipes.v.consumer_release(v_state)
            v_state = k_state.clone()
            k_state.advance()
        if const_expr(self.config.frees_queries):
            self.release_queries(pipes, mine.place)
        pipes.v.consumer_wait(v_state)
        pipes.v.consumer_release(v_state)
        if const_expr(not self.config.frees_queries):
            self.release_queries(pipes, mine.place)
        return k_state, v_state

    def row_group(self, group: Any) -> Any:
        """Number of a warpgroup's 64 rows in the tile of queries."""
        return group

    @property
    def width(self) -> int:
        """Keys of a tile whose scores a warpgroup has."""
        return self.config.tile_n

    def first_key(self, tile: Tile, key_tile: Int32) -> Int32:
        """Number of the first of them."""
        return key_tile * self.config.tile_n

    def walk(
        self, attend: Any, arguments: Arguments, grid: Grid, shared: Any, pipes: Pipes, states: States
    ) -> None:
        """Tile after tile of a block."""
        self.scheduler.walk(grid, arguments, pipes.next, attend, states)

    def running(self) -> Running:
        """Running numbers of a thread's rows."""
        return running(2, self.config.statistics)

    def products(self, mma: tuple[Any, Any], shared: Shared, lane: Int32, group: Int32) -> Products:
        tiles = shared.q[None, None, group], shared.k, shared.v
        return products_of(mma, tiles, (self.config.tile_n, self.config.head_dim_v), lane)

    def of_queries(
        self, products: Products, mma: tuple[Any, Any], q: Any, lane: Int32, place: Any
    ) -> Products:
        """The same products with the queries of one stage."""
        if self.ring.stages == 1:
            return products
        scores = mma[0]
        tile = scores.get_slice(lane).partition_A(q[None, None, place])
        return replace(products, q=scores.make_fragment_A(tile))

    def tile(self, mine: Mine, ends: RowEnds | None) -> Tile:
        """Lane l of a warpgroup holds rows l / 4, of this query, and l / 4 + 8 of its warp's 16."""
        at, offsets = mine.at, self.rows.offsets
        rows = prepare_rows(self.hooks, at, mine.query, offsets, ends)
        fragment = quad_fragment(at, rows, mine.query, self.width, mine.lane, offsets)
        softmax = self.weights(at, mine.state)
        dropout = RowDropout.of(self.hooks.dropout, at, mine.query, offsets, mine.lane % 4 * 2)
        return Tile(mine.pipes, mine.products, mine.group, fragment, softmax, dropout)

    def told(self, tile: Tile, mine: Mine, arguments: Arguments) -> Tile:
        """The tile, with what arguments tell of it besides."""
        return tile

    def weights(self, at: At, state: Running) -> Any:
        """The softmax of a thread's rows, or what stands in its place."""
        return weights_of(self.hooks, at, self.config.rescale_threshold, state)

    @cute.jit
    def first(
        self, tile: cutlass.Constexpr[Tile], key_tile: Int32, k_state: pipeline.PipelineState
    ) -> States:
        """Scores and softmax of the first key tile; its values follow in the next step."""
        pipes, products = tile.pipes, tile.products
        begun = self.begin(tile, key_tile, True)
        k = products.k[None, None, None, k_state.index]
        pipes.k.consumer_wait(k_state)
        self.multiply_queries(products, begun, k)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.modify(begun, tile, True)
        grid = begun.grid
        tile.softmax.start(self.highest(tile, grid))
        tile.softmax.exponentiate(grid)
        self.hand(tile, begun, k_state)
        v_state = k_state.clone()
        k_state.advance()
        self.clear_past_end(tile, key_tile, v_state)
        return k_state, v_state

    @cute.jit
    def step(
        self,
        tile: cutlass.Constexpr[Tile],
        key_tile: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> States:
        """Scores of this key tile and values of the one before, with this tile's softmax under both."""
        (k_state, v_state), pipes, products = states, tile.pipes, tile.products
        begun, v = self.issue(tile, key_tile, states, masked)
        self.issue_values(tile, v)
        self.give_turn(self.next(tile.group))
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        if const_expr(not tile.softmax.online):
            # Products that read P's registers halve the rate of arithmetic beside them.
            self.take_values(tile, v, v_state)
        self.modify(begun, tile, masked)
        grid = begun.grid
        raised = Boolean(False)
        if const_expr(tile.softmax.online):
            raised = self.raise_maxima(tile, grid)
        self.weigh(tile, grid, (v, v_state), not masked and self.finite)
        self.narrow(begun, products)
        self.drop(begun, tile)
        if const_expr(self.rescales(tile)):  # noqa: SIM102  one is decided when compiled, one when run
            if raised:
                rescale(products.out, (tile.softmax,))
        # Values take the same course through their ring as keys, one tile behind.
        v_state = k_state.clone()
        k_state.advance()
        if const_expr(masked):
            self.clear_past_end(tile, key_tile, v_state)
        return k_state, v_state

    @cute.jit
    def last(self, tile: cutlass.Constexpr[Tile], v_state: pipeline.PipelineState) -> None:
        """Values of the last key tile."""
        tile.pipes.v.consumer_wait(v_state)
        v = tile.products.v[None, None, None, v_state.index]
        self.issue_values(tile, v)
        self.take_values(tile, v, v_state)

    def issue_values(self, tile: Tile, v: cute.Tensor) -> None:
        """Issue the product with a tile of values."""
        products = tile.products
        multiply(products.values, products.out, products.p, v, True)

    def take_values(self, tile: Tile, v: cute.Tensor, v_state: pipeline.PipelineState) -> None:
        """Wait for the product with a tile of values, and give the tile back."""
        warpgroup.wait_group(0)
        tile.pipes.v.consumer_release(v_state)

    def weigh(self, tile: Tile, grid: cute.Tensor, values: tuple[Any, Any], is_finite: bool) -> None:
        """Scores become probabilities, after the product with the last tile's values (a tile of them and the
        state of their ring) where these are rescaled by the scores' maxima."""
        if tile.softmax.online:
            self.take_values(tile, *values)
        tile.softmax.exponentiate(grid, is_finite=is_finite)

    def raise_maxima(self, tile: Tile, grid: cute.Tensor) -> Boolean:
        """True if a tile's scores raise a maximum that is in use."""
        raised: Boolean = take_maxima((tile.softmax,), (grid,))
        return raised

    def rescales(self, tile: Tile) -> bool:
        """True if the output of earlier tiles is multiplied when maxima are raised."""
        return tile.softmax.online

    @property
    def finite(self) -> bool:
        """True if scores of tiles without masked pairs are."""
        return self.hooks.plain

    @property
    def clears(self) -> bool:
        """True if values past the end of a sequence may be anything."""
        return self.config.lengths != "dense"

    @cute.jit
    def clear_past_end(
        self, tile: cutlass.Constexpr[Tile], key_tile: Int32, v_state: pipeline.PipelineState
    ) -> None:
        """Zero the values of a masked tile past the end of a sequence, before the next step multiplies them.
        Dense tensors end where TMA fills in zeros itself."""
        if const_expr(self.clears):
            end = tile.fragment.at.kv_len - key_tile * self.config.tile_n
            if end < self.config.tile_n:
                tile.pipes.v.consumer_wait(v_state)
                zero_past(tile.products.v_shared[None, None, v_state.index], end, WRITTEN.at(tile.group))

    def issue(self, tile: Tile, key_tile: Int32, states: States, masked: bool) -> tuple[Begun, cute.Tensor]:
        """Take a turn, issue the product of this tile's scores in it, and wait for the values of the one
        before, which are returned. Between a turn and its last product, nothing should be computed that could
        have been before."""
        (k_state, v_state), pipes, products = states, tile.pipes, tile.products
        begun = self.begin(tile, key_tile, masked)
        k = products.k[None, None, None, k_state.index]
        v = products.v[None, None, None, v_state.index]
        pipes.k.consumer_wait(k_state)
        if self.starts:
            compute_before(begun.scores[cute.size(begun.scores) - 1])
        self.take_turn(tile.group)
        self.multiply_queries(products, begun, k)
        pipes.v.consumer_wait(v_state)
        return begun, v

    def begin(self, tile: Tile, key_tile: Int32, masked: bool) -> Begun:
        """Scores to accumulate into, and what the variant computes without them."""
        shape = tile.products.scores.partition_shape_C((ROWS, self.width))
        scores = cute.make_rmem_tensor(shape, Float32)
        kv_first = self.first_key(tile, key_tile)
        grid = rows_and_columns(scores)
        tile.fragment.start(self.hooks, grid, kv_first, masked)
        early = tile.fragment.prepare(self.hooks, kv_first, masked)
        allowed = tile.fragment.allowed(self.hooks, kv_first) if masked else None
        return Begun(scores, grid, kv_first, early, allowed)

    def multiply_queries(self, products: Products, begun: Begun, k: cute.Tensor) -> None:
        """Issue the product of queries and keys, after what scores start from."""
        multiply(products.scores, begun.scores, products.q, k, self.starts, self.config.depth)

    def highest(self, tile: Tile, grid: cute.Tensor) -> list[Float32]:
        """Largest scores of rows among the keys of a tile."""
        return tile.softmax.maxima(grid)

    def hand(self, tile: Tile, begun: Begun, k_state: pipeline.PipelineState) -> None:
        """Probabilities of the key tile at `k_state`, without those that dropout drops, are handed to the
        product with values."""
        self.narrow(begun, tile.products)
        self.drop(begun, tile)

    def narrow(self, begun: Begun, products: Products) -> None:
        """Probabilities become an operand of the product with values."""
        narrow(as_operand(begun.scores), products.p)

    def modify(self, begun: Begun, tile: Tile, masked: bool) -> None:
        """q.k becomes what the softmax is taken of: the variant's score, or -inf."""
        tile.fragment.modify(self.hooks, begun.grid, begun.early)
        if masked:
            tile.fragment.mask(begun.grid, begun.kv_first, begun.allowed)

    def drop(self, begun: Begun, tile: Tile) -> None:
        """Probabilities that dropout drops become 0 in the operand: they have been added to their rows'
        totals."""
        if tile.dropout is not None:
            tile.dropout.apply(tile.products.p, begun.kv_first)

    def storing_lane(self, lane: Int32, tile: Tile) -> Int32:
        """The lane, for the epilogue, whose addresses depend on nothing else: the compiler computes them
        before all tiles and keeps head_dim_v / 16 registers. Two spans per row leave no room for that."""
        return computed_once(lane) if tile.fragment.rows.most_spans > 1 else lane

    # --- turns ------------------------------------------------------------------------------------------

    @cute.jit
    def next(self, group: Int32) -> Int32:
        return group + 1 if group + 1 < self.config.consumers else Int32(0)

    @cute.jit
    def open_turns(self, group: Int32) -> None:
        if group == 0:
            self.give_turn(Int32(0))

    def take_turn(self, group: Int32) -> None:
        if self.config.pingpong:
            sync(TURN, group)

    def give_turn(self, group: Int32) -> None:
        if self.config.pingpong:
            arrive(TURN, group)

    def release_queries(self, pipes: Pipes, place: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.q_empty + place)
