"""The two warpgroups that multiply: products by wgmma, softmax in registers between them.

Each thread has parts of two rows, the same ones in both warpgroups, which therefore hand maxima on by row.
Each warpgroup has scores of its own blocks, and its half of the columns of the output. Of a tile of two
blocks, the first warpgroup takes maxima with its block and hands them on; the second one takes its block in,
and hands them back with its probabilities. The first one then rescales its own by what that raised, and hands
them on: all of a tile is relative to the same maxima.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import arrive, sync
from fa4flex.kernels.common.fragment import as_operand, computed_once, multiply, narrow, packed, widened
from fa4flex.kernels.common.gathered_key_values import swizzled
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.packed_rows import Part, Tile, first_full, tile_of
from fa4flex.kernels.common.products import tiled_product, tiled_products
from fa4flex.kernels.common.same_rows import add_totals, row_number, tell
from fa4flex.kernels.common.softmax import maxima, passed, rescale, take_all
from fa4flex.kernels.common.transfer import release
from fa4flex.kernels.decode_sm90 import consumer as base
from fa4flex.kernels.decode_sm90.consumer import Mine, row_of
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE, ROWS, Config
from fa4flex.kernels.mla_decode_sm90.epilogue import Epilogue
from fa4flex.kernels.mla_decode_sm90.producer import stage
from fa4flex.kernels.mla_decode_sm90.resources import Shared
from fa4flex.kernels.mla_decode_sm90.roles import BOTH, CLEARED, FIRST, MAXIMA, SECOND


class Mmas(NamedTuple):
    """Products of one warpgroup: S = q k', O += p v with p in registers, and with p in shared memory."""

    scores: cute.TiledMma
    own: cute.TiledMma
    other: cute.TiledMma


@dataclass(frozen=True)
class Products:
    """A warpgroup's operands: descriptors of queries and of its block of keys, probabilities of its block in
    registers, and of the other one's in shared memory; values of both blocks, its own first; the output."""

    scores: cute.TiledMma
    own: cute.TiledMma
    other: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    p: cute.Tensor
    other_p: cute.Tensor
    values: tuple[cute.Tensor, cute.Tensor]
    out: cute.Tensor


@dataclass(frozen=True)
class Whole:
    """Constants over a warpgroup's tiles of keys."""

    tile: Tile
    products: Products
    rows: tuple[Mine, ...]
    shared: Shared
    ring: Any
    lane: Int32


def tiled_mmas(kind: Any, config: Config) -> Mmas:
    columns = config.own * PIECE
    two = tiled_products(kind, BLOCK, columns)
    other = tiled_product(kind, (OperandMajorMode.K, OperandMajorMode.MN), columns)
    return Mmas(two.scores, two.values, other)


class Consumer(base.Consumer):
    """unit: number of the warpgroup, and of its block of a tile."""

    config: Config  # type: ignore[assignment]

    def __init__(self, config: Config, hooks: Hooks, unit: int) -> None:
        self.config = config
        self.hooks = hooks
        self.unit = unit
        self.width = BLOCK
        self.epilogue = Epilogue(config, hooks, unit)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        ring: cutlass.Constexpr[Any],
        mma: cutlass.Constexpr[Mmas],
    ) -> None:
        lane = cute.arch.thread_idx()[0] % 128
        tile = tile_of(part, arguments, self.hooks, self.config)
        if const_expr(self.unit == 0):
            copy_rows(arguments.q[tile.b, None, None, None], Int32(0), tile, shared.q, lane)
        sync(BOTH)
        whole = self.begun(arguments, tile, (shared, ring), mma, lane)
        full = first_full(tile)
        for i in cutlass.range(tile.first, full, unroll=1):
            self.visit(whole, i, True)
        for i in cutlass.range(full, tile.last, unroll=1):
            self.visit(whole, i, False)
        self.end(arguments, whole)

    def begun(
        self, arguments: Arguments, tile: Any, handed: tuple[Shared, Any], mma: Mmas, lane: Int32
    ) -> Whole:
        """State before any key. handed: shared memory and the ring of pieces."""
        rows, (shared, ring) = self.rows(arguments, tile, lane), handed
        for row in rows:
            row.softmax.state.clear()
        whole = Whole(tile, self.products(mma, shared, lane), rows, shared, ring, lane)
        whole.products.out.fill(0.0)
        return whole

    def end(self, arguments: Arguments, whole: Whole) -> None:
        """Sums of both warpgroups, and the results."""
        totals = [(row.softmax, 0) for row in whole.rows]
        add_totals(whole.shared.sums, self.unit, whole.lane, totals, BOTH)
        self.epilogue.run(arguments, whole.tile, whole.products, whole.rows, whole.lane)

    def products(self, mma: Mmas, shared: Shared, lane: Int32) -> Products:  # type: ignore[override]
        scores, own, other = mma
        config, mine, others = self.config, self.unit, 1 - self.unit
        one, two, three = (x.get_slice(lane) for x in mma)
        accumulator = cute.make_rmem_tensor(one.partition_shape_C((ROWS, BLOCK)), Float32)
        p = cute.make_rmem_tensor(as_operand(accumulator).shape, shared.pieces.element_type)
        values = [
            own.make_fragment_B(two.partition_B(shared.values(config, block, mine)))
            for block in (mine, others)
        ]
        return Products(
            scores,
            own,
            other,
            scores.make_fragment_A(one.partition_A(shared.q)),
            scores.make_fragment_B(one.partition_B(shared.keys(config, mine))),
            p,
            other.make_fragment_A(three.partition_A(shared.probabilities(config, others))),
            (values[0], values[1]),
            cute.make_rmem_tensor(two.partition_shape_C((ROWS, config.own * PIECE)), Float32),
        )

    # --- one tile of keys -----------------------------------------------------------------------------------

    @cute.jit
    def visit(self, whole: cutlass.Constexpr[Whole], i: Int32, masked: cutlass.Constexpr[bool]) -> None:
        phase = (i - whole.tile.first) % 2
        kv_first = tile_at(whole.tile.keys, i) * self.config.tile_n + self.unit * BLOCK
        scores, grids = self.scores_of_block(whole, kv_first, phase, masked)
        if const_expr(masked):
            self.clear_past_end_of(whole, kv_first)
        self.weigh(whole, scores, grids, phase)

    def weigh(self, whole: Whole, scores: cute.Tensor, grids: list, phase: Int32) -> None:
        """A tile, from this warpgroup's scores on."""
        others = range((1 - self.unit) * self.config.own, (2 - self.unit) * self.config.own)
        self.free(whole, self.unit, others, phase)
        if self.unit == 0:
            self.first(whole, scores, grids, phase)
        else:
            self.second(whole, scores, grids, phase)

    def scores_of_block(
        self, whole: Whole, kv_first: Any, phase: Int32, masked: bool
    ) -> tuple[cute.Tensor, list]:
        """Modified scores of this warpgroup's block, as accumulators and by row. kv_first: its first key, or
        what fragments find their keys by."""
        products, rows = whole.products, whole.rows
        scores = cute.make_rmem_tensor(products.scores.partition_shape_C((ROWS, BLOCK)), Float32)
        grids, early = [row_of(scores, r) for r in range(len(rows))], []
        for mine, grid in zip(rows, grids):
            mine.fragment.start(self.hooks, grid, kv_first, masked)
            allowed = mine.fragment.allowed(self.hooks, kv_first) if masked else None
            early.append((mine.fragment.prepare(self.hooks, kv_first, masked), allowed))
        atom = cute.make_mma_atom(products.scores.op)
        atom.set(warpgroup.Field.ACCUMULATE, self.hooks.start is not None)
        warpgroup.fence()
        steps = cute.size(products.q.shape[2]) // self.config.pieces
        for piece in range(self.config.pieces):
            whole.ring.consumer_wait(stage(self.config, self.unit, piece, phase))
            for k in range(piece * steps, (piece + 1) * steps):
                cute.gemm(atom, scores, products.q[None, None, k], products.k[None, None, k], scores)
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for mine, grid, (known, _) in zip(rows, grids, early):
            mine.fragment.modify(self.hooks, grid, known)
        if masked:
            at = self.where(whole, kv_first)
            for mine, grid, (_, allowed) in zip(rows, grids, early):
                mine.fragment.mask(grid, at, allowed)
        return scores, grids

    def where(self, whole: Whole, kv_first: Any) -> Any:
        """The same as kv_first, once there are scores."""
        return kv_first

    @cute.jit
    def first(
        self,
        whole: cutlass.Constexpr[Whole],
        scores: cute.Tensor,
        grids: cutlass.Constexpr[list],
        phase: Int32,
    ) -> None:
        """The first warpgroup's tile, from its scores on."""
        config, rows, products = self.config, whole.rows, whole.products
        self.take_maxima(products.out, rows, grids)
        self.tell_maxima(whole)
        arrive(MAXIMA)
        self.probabilities(rows, grids)
        narrow(as_operand(scores), products.p)
        words = self.words(whole)
        multiply(products.own, products.out, products.p, products.values[0], True)
        sync(SECOND)
        highest = [whole.shared.maxima[1, row_number(whole.lane, r)] for r in range(len(rows))]
        raised = above([mine.softmax for mine in rows], highest)
        if raised:
            take_all([mine.softmax for mine in rows], [[x] for x in highest])
            self.scale(whole, words)
        self.put(whole, words)
        arrive(FIRST)
        self.free(whole, 0, config.spare, phase)
        warpgroup.wait_group(0)
        self.free(whole, 0, range(config.own), phase)
        if raised:
            rescale(products.out, [mine.softmax for mine in rows])
        self.wait(whole, 1, phase)
        self.free(whole, 1, range(config.own, 2 * config.own), phase)
        self.other(whole)
        self.free(whole, 1, [*range(config.own), *config.spare], phase)

    @cute.jit
    def second(
        self,
        whole: cutlass.Constexpr[Whole],
        scores: cute.Tensor,
        grids: cutlass.Constexpr[list],
        phase: Int32,
    ) -> None:
        """The second warpgroup's."""
        config, rows, products = self.config, whole.rows, whole.products
        softmaxes = [mine.softmax for mine in rows]
        found = maxima(softmaxes, grids)
        sync(MAXIMA)
        before = [whole.shared.maxima[0, row_number(whole.lane, r)] for r in range(len(rows))]
        if passed(softmaxes, found) | above(softmaxes, before):
            take_all(softmaxes, [[cute.arch.fmax(x, y)] for (x,), y in zip(found, before)])
            rescale(products.out, softmaxes)
        self.tell_maxima(whole)
        self.probabilities(rows, grids)
        narrow(as_operand(scores), products.p)
        self.put(whole, self.words(whole))
        arrive(SECOND)
        self.free(whole, 1, config.spare, phase)
        multiply(products.own, products.out, products.p, products.values[0], True)
        self.wait(whole, 0, phase)
        self.free(whole, 0, range(config.own), phase)
        sync(FIRST)
        warpgroup.wait_group(0)
        self.free(whole, 1, range(config.own, 2 * config.own), phase)
        self.other(whole)
        self.free(whole, 0, [*range(config.own, 2 * config.own), *config.spare], phase)

    def wait(self, whole: Whole, block: int, phase: Int32) -> None:
        """Wait for all pieces of a block."""
        for piece in range(self.config.pieces):
            whole.ring.consumer_wait(stage(self.config, block, piece, phase))

    def other(self, whole: Whole) -> None:
        """Values of the other warpgroup's block."""
        products = whole.products
        multiply(products.other, products.out, products.other_p, products.values[1], True)
        warpgroup.wait_group(0)

    def free(self, whole: Whole, block: int, pieces: Any, phase: Int32) -> None:
        """This warp is done with pieces of a block."""
        for piece in pieces:
            release(whole.ring, stage(self.config, block, piece, phase))

    # --- what warpgroups hand to each other -----------------------------------------------------------------

    def tell_maxima(self, whole: Whole) -> None:
        """Write the maxima in use."""
        largest = [row.softmax.state.largest[0] for row in whole.rows]
        tell(whole.shared.maxima, self.unit, whole.lane, largest)

    def words(self, whole: Whole) -> cute.Tensor:
        """A copy of a thread's probabilities, two in each word: those of a product under way are its own."""
        given = cute.recast_tensor(whole.products.p, Int32)
        words = cute.make_rmem_tensor((cute.size(given),), Int32)
        for i in range(cute.size(given)):
            words[i] = computed_once(given[i])
        return words

    def scale(self, whole: Whole, words: cute.Tensor) -> None:
        """Multiply probabilities by what a raise of maxima says. Words alternate between a thread's rows."""
        kind = whole.products.p.element_type
        for i in range(cute.size(words)):
            by = whole.rows[i % 2].softmax.state.scale[0]
            low, high = widened(words[i], kind)
            words[i] = packed(low * by, high * by, kind)

    def put(self, whole: Whole, words: cute.Tensor) -> None:
        """Write a thread's probabilities where the other warpgroup's product reads them: the swizzle keeps
        lanes in different banks."""
        first = whole.shared.weights(self.config, self.unit).toint()
        lane, span = whole.lane, 2 * PIECE
        for i in range(cute.size(words)):
            column = 16 * (i // 4) + 8 * (i // 2 % 2) + lane % 4 * 2
            place = swizzled(row_number(whole.lane, i % 2) * span + 2 * column, span)
            cute.arch.inline_ptx(
                "st.shared.b32 [{$r0}], {$r1};", read_only_args=[first + place, Int32(words[i])]
            )
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_past_end_of(self, whole: cutlass.Constexpr[Whole], kv_first: Int32) -> None:
        """Zero the values of this warpgroup's block past the end of a sequence, once none of its warps reads
        it as keys. Dense tensors end where TMA fills in zeros itself."""
        if const_expr(self.config.clears):
            end = whole.rows[0].fragment.at.kv_len - kv_first
            if end < BLOCK:
                sync(CLEARED, self.unit)
                for half in cutlass.range_constexpr(BLOCKS):
                    clear(whole.shared.values(self.config, self.unit, half), end)
                cute.arch.fence_proxy("async.shared", space="cta")
                sync(CLEARED, self.unit)


@cute.jit
def clear(values: cute.Tensor, end: Int32) -> None:
    """Zero the keys from `end` on of values (column, key), by a warpgroup."""
    lane = cute.arch.thread_idx()[0] % 128
    columns, keys = (cute.size(values, mode=[i]) for i in range(2))
    for d in cutlass.range(lane, columns, 128, unroll=1):
        for key in cutlass.range(cutlass.max(end, 0), keys, unroll=1):
            values[d, key] = values.element_type(0.0)


def above(softmaxes: list, highest: list[Float32]) -> Boolean:
    """True if for some lane of the warp the other warpgroup has a larger maximum in use."""
    larger = (x > one.state.largest[0] for one, x in zip(softmaxes, highest))
    return cute.arch.vote_any_sync(reduce(operator.or_, larger))
