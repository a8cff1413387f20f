"""The consumer warpgroup: 64 rows, pairs of a query and a head, over keys each of which has an index of its
own. It holds dQ of its rows; what a tile of keys gets of them is added to sums in global memory.

Lane l of a warp has rows l / 4 and l / 4 + 8 of the warp's 16: rows of a head each in S, dP and dQ, and keys
in products for dK and dV.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, pipeline, select_
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.bwd_lists_sm90.arguments import ListsBackwardArguments
from fa4flex.kernels.bwd_lists_sm90.config import KEYS, TOGETHER, Config
from fa4flex.kernels.bwd_lists_sm90.resources import Mmas, Products, Shared, products_of
from fa4flex.kernels.bwd_lists_sm90.roles import FREE, SHARED
from fa4flex.kernels.bwd_sm90.dkv_epilogue import put
from fa4flex.kernels.common.backward import first_row
from fa4flex.kernels.common.barriers import Pipes, sync
from fa4flex.kernels.common.fragment import as_operand, compute_before, multiply, narrow, rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.packed_rows import Row, place_of
from fa4flex.kernels.common.pointwise import prepare_rows, quad_fragment, terms_of
from fa4flex.kernels.common.row_chunks import chunks_of, put_chunks
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.decode_sm90.consumer import OFFSETS, row_of
from fa4flex.kernels.lists.config import ROWS
from fa4flex.kernels.lists.fragment import Found, ListFragment, keys_of
from fa4flex.kernels.lists.tiles import ListTile, Walk, near


@dataclass(frozen=True)
class Mine:
    """One of a thread's rows: what stays the same over tiles of keys. slopes: terms of the score's derivative
    that are computed once per row; lse2, delta: see BackwardArguments; factor: of scores in exponents."""

    row: Row
    fragment: RowFragment
    slopes: tuple[Any, ...]
    lse2: Float32
    delta: Float32
    factor: Any


AT_ONCE = 4
"""Columns whose addresses, elements and terms are alive at once: S, dP and dQ leave no registers for more."""


@dataclass(frozen=True)
class RowFragment(ListFragment):
    """A ListFragment, a few columns of which are done before the next begin."""

    def _pinned(self, scores: Any, places: Any) -> Any:
        for c in range(0, len(self.columns), AT_ONCE):
            yield from itertools.islice(places, AT_ONCE)
            compute_before(scores[0, c + AT_ONCE - 1])


@dataclass(frozen=True)
class Whole:
    """State of the warpgroup for all tiles of keys. first_key: number of a thread's first key in a tile;
    dk, dv: addresses of its first numbers in the sums of the head's first key."""

    products: Products
    rows: tuple[Mine, ...]
    shared: Shared
    pipes: Pipes
    lane: Int32
    first_key: Int32
    dk: Int64
    dv: Int64


class Consumer:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def bring_rows(
        self,
        arguments: ListsBackwardArguments,
        tile: ListTile,
        shared: cutlass.Constexpr[Shared],
        lane: Int32,
    ) -> None:
        """Q and dO to shared memory. Threads meet after it, as they do when entries are known."""
        q, dout = arguments.q, arguments.dout
        if const_expr(cute.rank(q) == 4):
            q, dout = (x[tile.b, None, None, None] for x in (q, dout))
        any_tile: Any = tile
        copy_rows(q, tile.q_offset, any_tile, shared.q, lane)
        copy_rows(dout, tile.q_offset, any_tile, shared.dout, lane)

    @cute.jit
    def visit(
        self,
        arguments: ListsBackwardArguments,
        tile: ListTile,
        walk: Walk,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mmas: cutlass.Constexpr[Mmas],
    ) -> None:
        """All tiles of keys, and dQ."""
        whole = self.whole(arguments, tile, shared, pipes, mmas)
        whole.products.dq.fill(0.0)
        kind = pipeline.PipelineUserType.Consumer
        k_state = pipeline.make_pipeline_state(kind, self.config.kv_stages)
        v_state = pipeline.make_pipeline_state(kind, self.config.v_stages)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            k_state, v_state = self.step(whole, i >= walk.listed, (k_state, v_state))
        self.store(arguments, tile, whole)

    def whole(
        self,
        arguments: ListsBackwardArguments,
        tile: ListTile,
        shared: Shared,
        pipes: Pipes,
        mmas: Mmas,
    ) -> Whole:
        lane = cute.arch.thread_idx()[0] - 128
        number = lane // 32 * 16 + lane % 32 // 4
        rows = tuple(self.row(arguments, tile, number + offset, lane) for offset in OFFSETS)
        products = products_of(mmas, shared, lane, self.config.head_dim)
        sums = (
            self.first_of(x, tile, width) + Int64(lane % 4 * 16)
            for x, width in (
                (arguments.dk_sum, self.config.head_dim),
                (arguments.dv_sum, self.config.head_dim_v),
            )
        )
        return Whole(products, rows, shared, pipes, lane, number, *sums)

    def first_of(self, sums: cute.Tensor, tile: ListTile, width: int) -> Int64:
        """Address of the sums of a head's first key, in this sequence."""
        if cute.rank(sums) == 3:
            return sums[tile.b, tile.kv_head, None].iterator.toint()
        return sums[tile.kv_head, None].iterator.toint() + Int64(tile.kv_offset) * (4 * width)

    def row(self, arguments: ListsBackwardArguments, tile: ListTile, number: Int32, lane: Int32) -> Mine:
        hooks, given = self.hooks, tile.row(number)
        read: Any = arguments
        at = place_of(given, tile, read, hooks).but(scale_log2=arguments.scale_log2)  # type: ignore[arg-type]
        # Probabilities are what a mask hides.
        terms = replace(prepare_rows(hooks, at, given.q, (0,)), hidden=0.0)
        seen, own = None, None
        if self.config.beside:
            seen = near(given.q, tile, read)
        if self.config.united > 1:
            own = Int32(1) << ((given.q - tile.first_q) // Int32(arguments.queries))
        fragment = quad_fragment(at, terms, given.q, KEYS, lane)
        lse2, delta = (self.statistic(x, arguments, tile, given) for x in (arguments.lse2, arguments.delta))
        return Mine(
            given,
            RowFragment.of(fragment, seen, own, hooks),
            terms_of(hooks.slope, "row", at.but(q=terms.q[0], q_float=terms.q_float[0])),
            # Rows that are not there see nothing.
            Float32(select_(given.exists, lse2, Float32.inf)),
            delta,
            at.scale_log2 if hooks.factor is None else hooks.factor(at),
        )

    def statistic(
        self, x: cute.Tensor, arguments: ListsBackwardArguments, tile: ListTile, row: Row
    ) -> Float32:
        """Number of a row, of [B, H, R], or of packed [H, R]."""
        if cute.rank(x) == 3:
            return Float32(x[tile.b, row.h, row.q])
        return Float32(x[row.h, first_row(arguments.cu_seqlens_q, tile.b) + row.q])

    @cute.jit
    def step(self, whole: cutlass.Constexpr[Whole], beside: cutlass.Boolean, states: States) -> States:
        """One tile of keys."""
        k_state, v_state = states
        products, pipes, shared = whole.products, whole.pipes, whole.shared
        mmas, kind = products.mmas, shared.q.element_type
        found, keys = self.found(whole, k_state, beside)
        scores, dprob = self.scores(whole, states)
        allowed = [mine.fragment.allowed(self.hooks, found) for mine in whole.rows]
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        for r, mine in enumerate(whole.rows):
            self.differentiate(mine, row_of(scores, r), row_of(dprob, r), found)
            mine.fragment.mask(row_of(scores, r), self.listing(whole, found, k_state), allowed[r])
            multiply_row(row_of(dprob, r), row_of(scores, r))
        arrive_once(pipes.ids_empty + k_state.index)
        p, ds = (cute.make_rmem_tensor(as_operand(x).shape, kind) for x in (scores, dprob))
        narrow(as_operand(scores), p)
        narrow(as_operand(dprob), ds)
        sync(FREE)
        put(mmas.scores, p, shared.p, whole.lane)
        put(mmas.scores, ds, shared.ds, whole.lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync(SHARED)
        dv = cute.make_rmem_tensor(mmas.dv.partition_shape_C((KEYS, self.config.head_dim_v)), Float32)
        multiply(mmas.dv, dv, products.p_t, products.dout_t, False)
        multiply(mmas.dq, products.dq, ds, products.k_t[None, None, None, k_state.index], True)
        warpgroup.wait_group(1)
        add_rows(whole.dv, dv, keys, self.config.head_dim_v)
        dk = cute.make_rmem_tensor(mmas.dk.partition_shape_C((KEYS, self.config.head_dim)), Float32)
        multiply(mmas.dk, dk, products.ds_t, products.q_t, False)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        add_rows(whole.dk, dk, keys, self.config.head_dim)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    def found(
        self, whole: Whole, state: pipeline.PipelineState, beside: Any
    ) -> tuple[Found, tuple[Int32, ...]]:
        """Keys of this thread's columns of S, and of its rows of dK and dV."""
        shared, pipes = whole.shared, whole.pipes
        cute.arch.mbarrier_wait(pipes.ids_full + state.index, state.phase)
        fragment = whole.rows[0].fragment
        ids = shared.ids[None, 0, state.index]
        told = keys_of(ids, fragment.first_column, fragment.columns)
        return Found(told, beside if self.config.beside else None), keys_of(ids, whole.first_key, OFFSETS)

    def listing(self, whole: Whole, found: Found, state: pipeline.PipelineState) -> Any:
        """The same, with the rows of the lists that list these keys: read late, as they take a register
        each."""
        if self.config.united == 1:
            return found
        fragment = whole.rows[0].fragment
        bits = whole.shared.ids[None, 1, state.index]
        return replace(found, rows=keys_of(bits, fragment.first_column, fragment.columns))

    def scores(self, whole: Whole, states: States) -> tuple[cute.Tensor, cute.Tensor]:
        """S and dP, whose products are issued."""
        (k_state, v_state), products, pipes = states, whole.products, whole.pipes
        mma = products.mmas.scores
        scores = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, KEYS)), Float32)
        dprob = cute.make_rmem_tensor(scores.shape, Float32)
        pipes.k.consumer_wait(k_state)
        multiply(mma, scores, products.q, products.k[None, None, None, k_state.index], False)
        pipes.v.consumer_wait(v_state)
        multiply(mma, dprob, products.dout, products.v[None, None, None, v_state.index], False)
        return scores, dprob

    def differentiate(self, mine: Mine, scores: Any, dprob: Any, found: Any) -> None:
        """A row (1, column): q.k becomes P, as if no pair were hidden, and dP what dS is P times."""
        fragment, hooks, columns = mine.fragment, self.hooks, range(cute.size(scores, mode=[1]))
        for c in columns:
            dprob[0, c] = dprob[0, c] + mine.delta
        if hooks.slope is not None:
            for r, c, at in fragment.by_groups(hooks.slope, dprob, found, True, (mine.slopes,)):
                dprob[r, c] = dprob[r, c] * hooks.slope.element(at.but(score=scores[r, c]))
        fragment.change(hooks, scores, found, True)
        for c in columns:
            scores[0, c] = cute.math.exp2(scores[0, c] * mine.factor - mine.lse2, fastmath=True)

    @cute.jit
    def store(
        self, arguments: ListsBackwardArguments, tile: ListTile, whole: cutlass.Constexpr[Whole]
    ) -> None:
        """dQ to global memory."""
        dq, kind = whole.products.dq, arguments.dq.element_type
        dq.store(dq.load() * arguments.scale)
        grid = rows_and_columns(dq)
        for r in cutlass.range_constexpr(len(whole.rows)):
            row = whole.rows[r].row
            chunks = chunks_of(grid[r, None], kind, whole.lane)
            if row.exists:
                if const_expr(cute.rank(arguments.dq) == 4):
                    put_chunks(arguments.dq[tile.b, row.q, row.h, None], chunks)
                else:
                    put_chunks(arguments.dq[tile.q_offset + row.q, row.h, None], chunks)


def multiply_row(dprob: cute.Tensor, p: cute.Tensor) -> None:
    """A row (1, column) of dP becomes dS."""
    for c in range(cute.size(p, mode=[1])):
        dprob[0, c] = p[0, c] * dprob[0, c]


@cute.jit
def add_rows(
    first: Int64,
    acc: cute.Tensor,
    keys: cutlass.Constexpr[tuple[Int32, ...]],
    width: cutlass.Constexpr[int],
) -> None:
    """Add a thread's rows of an accumulator to those of `keys` in global memory, where there is such a key.
    first: address of its first numbers in the row of key 0, in the order of SumsConfig."""
    grid = rows_and_columns(acc)
    for r in cutlass.range_constexpr(len(keys)):
        if keys[r] >= 0:
            address = first + Int64(keys[r]) * (4 * width)
            for j in cutlass.range_constexpr(width // TOGETHER):
                add_four(address + 4 * TOGETHER * j, [grid[r, 4 * j + i] for i in range(4)])


def add_four(address: Int64, four: list[Float32]) -> None:
    """Add four float32 to those from an address on, each of which is added up with others at any time."""
    cute.arch.inline_ptx(
        "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *four],
    )
