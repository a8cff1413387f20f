"""Tiles of few rows: all queries of a sequence, of all heads that share a KV head.

Both consumer warpgroups have all rows, and of every tile of keys each has half. In the end the second hands
its sums to the first, thread by thread.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, select_
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, sync
from fa4flex.kernels.common.fragment import as_operand, multiply, narrow, quad_reduce, rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.packed_rows import Row, Tile, keys_of, run_of
from fa4flex.kernels.common.products import Products, products_of, tiled_products, zero_past
from fa4flex.kernels.common.softmax import finite, rescale, take_maxima
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.common.work import Work, put_statistic
from fa4flex.kernels.decode_sm90 import config as decode
from fa4flex.kernels.decode_sm90 import consumer, epilogue
from fa4flex.kernels.decode_sm90.consumer import OFFSETS, Keys, Mine
from fa4flex.kernels.fwd_sm90.roles import WRITTEN
from fa4flex.kernels.mixed_sm90.config import GROUPS, KEPT, Config
from fa4flex.kernels.mixed_sm90.merging import Merging
from fa4flex.kernels.mixed_sm90.resources import Shared
from fa4flex.kernels.mixed_sm90.roles import BOTH
from fa4flex.kernels.mixed_sm90.sequences import Cut, Piece, log_sums, outputs


def few_tile(work: Work, cut: Cut, arguments: Arguments, hooks: Hooks, config: Config) -> Tile:
    """All rows of a sequence that share head `work.h` of keys, and a part of the key tiles that some row
    sees: perhaps none."""
    heads, kv_heads = Int32(arguments.q.shape[1]), Int32(arguments.k.shape[2])
    zero = Int32(0)
    whole = KeyTiles(None, None, zero, zero)
    place = work.b, work.h, heads // kv_heads, heads, cut.part, work.q_len, work.kv_len
    tile = Tile(*place, whole, zero, zero)
    keys = keys_of(tile, arguments, hooks, config)
    first, last = run_of(keys.count, cut.part, cut.parts, config.share)
    return tile._replace(keys=keys, first=first, last=last)


@dataclass(frozen=True)
class MyRow(Mine):
    """`used`: some lane of the warp has such a row."""

    used: Boolean


class FewRows(consumer.Consumer):
    """A consumer warpgroup's tiles of few rows."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(_config(config), hooks)
        self.mixed = config
        self.packed = Epilogue(self.config, hooks)
        self.merging = Merging(self.config)

    @cute.jit
    def attend(
        self,
        piece: Piece,
        arguments: Arguments,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        phase: Int32,
        states: States,
    ) -> States:
        work, cut = piece
        thread = cute.arch.thread_idx()[0] - 128
        group, lane = cute.arch.make_warp_uniform(thread // 128), thread % 128
        tile = few_tile(work, cut, arguments, self.hooks, self.mixed)
        rows = self.rows(arguments, tile, lane)
        for row in rows:
            row.softmax.state.clear()
        products = self.halves(shared, lane, group)
        products.out.fill(0.0)
        cute.arch.mbarrier_wait(pipes.q_full + group, phase)
        self.copy_queries(arguments, work, tile, shared, lane, group)
        # Tiles of many rows leave the state of values where their last tile was.
        k_state, _ = states
        if tile.first < tile.last:
            k_state = self.keys(products, rows, pipes, tile, group, k_state)
        self.merge(products, rows, shared, lane, group)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.q_empty + group)
        if group == 0 and rows[0].used:  # of a warp's rows, the first ones are used if any is
            self.packed.write(arguments, piece, products, rows, lane)
            if const_expr(self.mixed.share is None):  # noqa: SIM102  one is decided when compiled, one when run
                if cut.parts > 1:
                    self.merging.run(arguments, piece, tile, lane)
        return k_state, k_state.clone()

    @cute.jit
    def keys(
        self,
        products: cutlass.Constexpr[Products],
        rows: cutlass.Constexpr[tuple[MyRow, ...]],
        pipes: cutlass.Constexpr[Pipes],
        tile: Tile,
        group: Int32,
        k_state: Any,
    ) -> Any:
        """All keys of a part, one tile at least. Those that are masked come first, and the first one is taken
        for masked."""
        begun = GROUPS * tile_at(tile.keys, tile.first) + group
        states = self.first(products, rows, pipes, begun, k_state)

        @cute.jit
        def steps(begin: Int32, end: Int32, states: States, masked: cutlass.Constexpr[bool]) -> States:
            k_state, v_state = states
            for i in cutlass.range(begin, end, unroll=1):
                half = GROUPS * tile_at(tile.keys, i) + group
                k_state, v_state = self.overlapped(products, rows, pipes, half, (k_state, v_state), masked)
            return k_state, v_state

        first = tile.first + 1
        full = cutlass.max(cutlass.min(tile.keys.masked_count, tile.last), first)
        states = steps(first, full, states, True)
        k_state, v_state = steps(full, tile.last, states, False)
        pipes.v.consumer_wait(v_state)
        v = products.v[None, None, None, v_state.index]
        multiply(products.values, products.out, products.p, v, True)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        return k_state

    @cute.jit
    def first(
        self,
        products: cutlass.Constexpr[Products],
        rows: cutlass.Constexpr[tuple[MyRow, ...]],
        pipes: cutlass.Constexpr[Pipes],
        half: Int32,
        k_state: Any,
    ) -> States:
        """Scores and softmax of the first keys; their values follow in the next step."""
        self.softmax(products, rows, pipes, Keys(half, True), k_state)
        v_state = k_state.clone()
        k_state.advance()
        self.clear_half(products, rows[0], pipes, half, v_state)
        return k_state, v_state

    @cute.jit
    def overlapped(
        self,
        products: cutlass.Constexpr[Products],
        rows: cutlass.Constexpr[tuple[MyRow, ...]],
        pipes: cutlass.Constexpr[Pipes],
        half: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> States:
        """Scores of these keys, and values of those before with this tile's softmax under them."""
        k_state, v_state = states
        scores, grids, early = self.begin(products, rows, half, masked)
        k = products.k[None, None, None, k_state.index]
        v = products.v[None, None, None, v_state.index]
        pipes.k.consumer_wait(k_state)
        multiply(products.scores, scores, products.q, k, self.hooks.start is not None)
        pipes.v.consumer_wait(v_state)
        multiply(products.values, products.out, products.p, v, True)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self.modify(rows, grids, early, half, masked)
        raised = take_maxima([mine.softmax for mine in rows], grids)
        self.probabilities(rows, grids)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        narrow(as_operand(scores), products.p)
        if raised:
            rescale(products.out, [mine.softmax for mine in rows])
        v_state = k_state.clone()
        k_state.advance()
        if const_expr(masked):
            self.clear_half(products, rows[0], pipes, half, v_state)
        return k_state, v_state

    def halves(self, shared: Shared, lane: Int32, group: Int32) -> Products:
        """Products of a warpgroup's half of each tile of keys."""
        mixed, every = self.mixed, (None, None, None)
        half, d, dv = mixed.half, mixed.head_dim, mixed.head_dim_v
        k = cute.local_tile(shared.k, (half, d), every)[None, None, group, 0, None]
        v = cute.local_tile(shared.v, (dv, half), every)[None, None, 0, group, None]
        mma = tiled_products(shared.k.element_type, half, dv)
        return products_of(mma, (shared.q[None, None, group], k, v), (half, dv), lane)

    def rows(self, arguments: Arguments, tile: Tile, lane: Int32) -> tuple[MyRow, ...]:
        first = cute.arch.make_warp_uniform(lane // 32) * 16
        mine = super().rows(arguments, tile, lane)
        return tuple(MyRow(**vars(one), used=first + n < tile.rows) for n, one in zip(OFFSETS, mine))

    @cute.jit
    def probabilities(
        self, rows: cutlass.Constexpr[tuple[MyRow, ...]], grids: cutlass.Constexpr[list]
    ) -> None:
        """Most tiles have fewer rows than a product. Of others nothing is kept."""
        for mine, grid in zip(rows, grids):
            if mine.used:
                mine.softmax.exponentiate(grid)

    @cute.jit
    def copy_queries(
        self,
        arguments: Arguments,
        work: Work,
        tile: Tile,
        shared: cutlass.Constexpr[Shared],
        lane: Int32,
        group: Int32,
    ) -> None:
        """All rows of the tile to the warpgroup's room."""
        copy_rows(arguments.q, work.q_offset, tile, shared.q[None, None, group], lane)
        sync(WRITTEN, group)

    @cute.jit
    def merge(
        self,
        products: cutlass.Constexpr[Products],
        rows: cutlass.Constexpr[tuple[MyRow, ...]],
        shared: cutlass.Constexpr[Shared],
        lane: Int32,
        group: Int32,
    ) -> None:
        """The first warpgroup's rows become those of all keys. No product reads the queries any more when the
        sums are written over them, and no sum is read any more when the next queries come."""
        first = lane // 32 * 16 + lane % 32 // 4
        out = products.out
        sync(BOTH)
        used = rows[0].used  # of a warp's rows, the first ones are used if any is
        if group == 1 and used:
            cute.autovec_copy(_line(out), shared.sums[lane, None])
            for offset, mine in zip(OFFSETS, rows):
                state = mine.softmax.state
                total = quad_reduce(state.total[0], operator.add)
                if lane % 4 == 0:
                    for i, x in enumerate((state.largest[0], state.shift[0], total)):
                        shared.kept[first + offset, i] = x
        sync(BOTH)
        if group == 0 and used:
            weights = []
            for offset, mine in zip(OFFSETS, rows):
                largest, shift, total = (shared.kept[first + offset, i] for i in range(KEPT))
                # All lanes of a row have its maximum, and each a share of the total.
                total = select_(lane % 4 == 0, total, Float32(0.0))
                weights.append(_joined(mine, [largest, shift, total]))
            both = rows_and_columns(out)
            handed = cute.make_rmem_tensor_like(out)
            cute.autovec_copy(shared.sums[lane, None], _line(handed))
            others = rows_and_columns(handed)
            for r, (own, other) in enumerate(weights):
                both[r, None].store(both[r, None].load() * own + others[r, None].load() * other)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync(BOTH)

    @cute.jit
    def clear_half(
        self,
        products: cutlass.Constexpr[Products],
        mine: cutlass.Constexpr[Mine],
        pipes: cutlass.Constexpr[Pipes],
        half: Int32,
        v_state: Any,
    ) -> None:
        """Zero the values past the end of a sequence in a warpgroup's half, before the next step multiplies
        them."""
        end = mine.fragment.at.kv_len - half * self.config.tile_n
        if end < self.config.tile_n:
            pipes.v.consumer_wait(v_state)
            group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
            zero_past(products.v_shared[None, None, v_state.index], end, WRITTEN.at(group))


def _line(registers: cute.Tensor) -> cute.Tensor:
    """All of a thread's registers, one after another."""
    return cute.make_tensor(registers.iterator, cute.make_layout(cute.size(registers)))


def _joined(mine: Mine, theirs: list[Float32]) -> tuple[Float32, Float32]:
    """Weights of a row's own sums and of the others, and a state of both. Who has seen no key of a row has no
    weight there."""
    state, (largest, shift, total) = mine.softmax.state, theirs
    none = -Float32.inf
    own_none, none_there = state.largest[0] == none, largest == none
    common = cute.arch.fmax(select_(own_none, none, state.shift[0]), select_(none_there, none, shift))
    common = finite(common)
    own = cute.math.exp2(state.shift[0] - common, fastmath=True)
    other = cute.math.exp2(shift - common, fastmath=True)
    own, other = select_(own_none, Float32(0.0), own), select_(none_there, Float32(0.0), other)
    state.largest[0] = cute.arch.fmax(state.largest[0], largest)
    state.shift[0] = common
    state.total[0] = state.total[0] * own + total * other
    return own, other


class Epilogue(epilogue.Epilogue):
    @cute.jit
    def write(
        self,
        arguments: Arguments,
        piece: Piece,
        products: cutlass.Constexpr[Products],
        rows: cutlass.Constexpr[tuple[Mine, ...]],
        lane: Int32,
    ) -> None:
        """Packed rows and their log-sum-exps, or what a part of the keys leaves of them. Sinks join here
        where there are no parts; otherwise where these are merged."""
        work, cut = piece
        out, finished = self.finished(arguments, products, rows, cut.parts == 1)
        number = lane // 32 * 16 + lane % 32 // 4
        for r in cutlass.range_constexpr(len(rows)):
            row = rows[r].row
            if cut.parts == 1:
                self.packed(arguments, work, row, out[r, None], finished[r].lse, lane)
            else:
                place = cut.first + number + OFFSETS[r]
                self.partial(arguments, place, row.exists, out[r, None], finished[r].lse, lane)

    @cute.jit
    def packed(
        self, arguments: Arguments, work: Work, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        if const_expr(arguments.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if row.exists and lane % 4 == 0:
                put_statistic(arguments.lse, work._replace(h=row.h), row.q, lse)
        self.store(arguments.out[work.q_offset + row.q, row.h, None], out, row.exists, lane)

    @cute.jit
    def partial(
        self,
        arguments: Arguments,
        number: Int32,
        exists: Boolean,
        out: cute.Tensor,
        lse: Float32,
        lane: Int32,
    ) -> None:
        """Row of this number, if it exists. A part without keys has no output: nobody reads it."""
        if exists and lane % 4 == 0:
            log_sums(arguments)[number] = lse
        self.store(outputs(arguments)[number, None], out, exists & (lse > -Float32.inf), lane)


def _config(config: Config) -> decode.Config:
    """Configuration of the kernel for few rows, over a warpgroup's half of the keys."""
    return decode.Config(
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        tile_n=config.half,
        kv_stages=config.kv_stages,
        blocks=1,
        producer_registers=config.producer_registers,
        consumer_registers=config.consumer_registers,
        rescale_threshold=config.rescale_threshold,
        lengths=config.lengths,
        paged=config.paged,
        box_rows=config.boxes.rows if config.boxes else 0,
        sinks=config.sinks,
        statistics=config.statistics,
    )
