"""A softmax warpgroup: one query tile of 128 rows, a row per thread, so that no lane needs another's numbers.

Scores come from tensor memory and probabilities go back over them. The product with the values starts on the
first of them while the last are computed, and the row's sum is taken after all are handed over
(FlashAttention-4's forward pipeline).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.bits import consecutive, shifted
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.dropout import LaneDropout
from fa4flex.kernels.common.fragment import compute_before, computed_once, numbers
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.max_logit import largest_of_warp, largest_seen, put_largest
from fa4flex.kernels.common.pointwise import Fragment, prepare_rows
from fa4flex.kernels.common.softmax import LN_2, LaneSoftmax, Running, logit_of, running
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once, arrive_where, put_where
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.weights import weights_of
from fa4flex.kernels.common.work import Grid, Work, put_statistic
from fa4flex.kernels.fwd_sm100.config import FRAGMENT, ROWS, Config
from fa4flex.kernels.fwd_sm100.mma_ahead import after
from fa4flex.kernels.fwd_sm100.resources import Products, Shared, column, first_row, stage_column
from fa4flex.kernels.fwd_sm100.rows import (
    Moments,
    Pair,
    Row,
    exponentiate,
    largest_of,
    narrowed,
    paired,
    put,
    softpicked,
    total_of,
)


@dataclass(frozen=True)
class Tile:
    """Constants over the key tiles of one query tile."""

    fragment: Fragment
    softmax: LaneSoftmax
    dropout: LaneDropout | None


@dataclass(frozen=True)
class Place:
    """A warpgroup's query tile, a thread's row in it and the CTA's place in its pair; in tensor memory scores
    and probabilities, by fragment, and scores to be read and to be written in place, by piece; and the dtype
    of probabilities. `stage`, `scale`: barriers of the scores at hand, and the place of their scale: the
    query tile's, or one of its stages."""

    tile: Int32
    stage: Int32
    scale: Int32
    row: Int32
    warp: Int32
    rank: Int32
    scores: Blocks
    probabilities: Blocks
    pieces: Blocks
    changed: Blocks
    kind: Any


class Softmax:
    largest_of: Any = staticmethod(largest_of)

    def __init__(self, config: Config, hooks: Hooks, scheduler: TileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        place = self.place(products, base)
        state = running(1, self.config.statistics)

        @cute.jit
        def normalise(work: Work, phase: Int32, turn: Int32) -> Int32:
            at = self.scheduler.place(work, grid, arguments)
            keys = self.scheduler.keys(at, work, arguments)
            q = first_row(self.config, work, place.tile, place.rank) + place.row
            tile = self.told(self.tile(at, q, state, keys), work, keys, arguments)
            state.clear()
            passes = self.passes(keys)
            for p in cutlass.range_constexpr(len(passes)):
                masked, first, end = passes[p]
                for i in cutlass.range(first, end, unroll=1):
                    here, full = self.turned(place, turn, phase)
                    self.step(tile, here, shared, pipes, (tile_at(keys, i), i, full), masked)
                    turn = self.following(turn)
            self.finish(arguments, work, tile, place, (shared, pipes), (q, phase))
            return turn

        self.scheduler.walk(grid, arguments, pipes.next, normalise, Int32(0))

    def passes(self, keys: KeyTiles) -> list[tuple[bool, Int32, Int32]]:
        """(masked, first, end) for runs of key tiles. Where scores read so much that pieces are short, all
        are: a second step would take long to compile, and bits are nothing beside reads."""
        if self.config.piece < FRAGMENT:
            return [(True, Int32(0), keys.count)]
        return [(True, Int32(0), keys.masked_count), (False, keys.masked_count, keys.count)]

    def turned(self, place: Place, turn: Int32, of_row: Int32) -> tuple[Place, Int32]:
        """The place of the key tile of this turn, and the phase of its barriers; of scores in stages, a turn
        is the number of the key tile modulo TURNS. `of_row`: the number of the tile of queries modulo 2."""
        if self.config.score_stages == 1:
            return place, turn
        stage = turn & 1
        columns = stage_column(self.config, stage)
        moved = {
            name: getattr(place, name).moved(columns)
            for name in ("scores", "probabilities", "pieces", "changed")
        }
        # The first key tile of each row has no scale.
        scale = (turn + of_row + 1) & 1
        return replace(place, stage=stage, scale=scale, **moved), turn >> 1

    def following(self, turn: Int32) -> Int32:
        return turn ^ 1 if self.config.score_stages == 1 else after(turn)

    def place(self, products: Products, base: cute.Pointer) -> Place:
        thread = cute.arch.thread_idx()[0]
        tile = cute.arch.make_warp_uniform(thread // ROWS)
        row = thread % ROWS
        rows_and_keys = products.scores_at(base, tile)[(None, None), 0, 0]
        scores = cute.flat_divide(rows_and_keys, (ROWS, FRAGMENT))[None, None, 0, None]
        columns = self.config.piece
        pieces = cute.flat_divide(rows_and_keys, (ROWS, columns))[None, None, 0, None]
        # Two or four probabilities in a column of 32 bits.
        each = 32 // products.value_kind.width
        words = cute.make_layout((ROWS, self.config.tile_n // each))
        packed = cute.composition(rows_and_keys.layout, words)
        start = base + column(self.config.memory.probabilities, tile)
        probabilities = cute.flat_divide(cute.make_tensor(start, packed), (ROWS, FRAGMENT // each))
        return Place(
            tile,
            tile,
            tile,
            row,
            cute.arch.make_warp_uniform(row // 32),
            self.cluster.rank(),
            Blocks.load(tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT)), scores, row),
            Blocks.store(
                tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT // each)),
                probabilities[None, None, 0, None],
                row,
            ),
            Blocks.load(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), pieces, row),
            Blocks.store(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), pieces, row),
            products.value_kind,
        )

    def tile(self, at: At, row: Int32, state: Running, keys: KeyTiles) -> Tile:
        dropout = LaneDropout.of(self.hooks.dropout, at, row)
        return Tile(self.fragment(at, row), self.weights(at, state), dropout)

    def weights(self, at: At, state: Running) -> Any:
        """The softmax of a thread's row, or what stands in its place."""
        return weights_of(self.hooks, at, self.config.rescale_threshold, state, lanes=True)

    def told(self, tile: Tile, work: Work, keys: KeyTiles, arguments: Arguments) -> Tile:
        """The tile, with what else is read for its row."""
        return tile

    def begin(self, tile: Tile, i: Int32) -> None:
        """Prepare for the i-th key tile of a row."""

    def fragment(self, at: At, row: Int32, columns: int = FRAGMENT) -> Fragment:
        rows = prepare_rows(self.hooks, at, row, (0,))
        return Fragment(at, rows, (0,), tuple(range(columns)), row, Int32(0), consecutive)

    @cute.jit
    def step(
        self,
        tile: cutlass.Constexpr[Tile],
        place: cutlass.Constexpr[Place],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        which: tuple[Int32, Int32, Int32],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """The key tile of this number, the i-th of its row, whose scores come in this phase."""
        key_tile, i, phase = which
        kv_first = key_tile * self.config.tile_n
        self.begin(tile, i)
        rows, largest = self.awaited(tile, place, pipes.s_full, (kv_first, phase), masked)
        if const_expr(tile.softmax.online):
            self.raise_maximum(tile.softmax, largest)
        self.hand_scale(tile, place, shared, pipes, i)
        pairs = self.probabilities(tile, place, rows, pipes, kv_first)
        if const_expr(tile.softmax.online):
            total = tile.softmax.state.total
            total[0] = total_of(pairs, total[0])

    def awaited(
        self, tile: Tile, place: Place, full: Any, of_tile: tuple[Int32, Int32], masked: bool
    ) -> tuple[list[list[Float32]], Float32]:
        """Modified scores of the key tile that starts at a key, once they are there in a phase, and the
        largest."""
        kv_first, phase = of_tile
        words = self.allowed(tile, kv_first) if masked else None
        cute.arch.mbarrier_wait(full + place.stage, phase)
        return self.taken(tile, place, kv_first, words)

    @property
    def fragments(self) -> int:
        return self.config.tile_n // FRAGMENT

    def allowed(self, tile: Tile, kv_first: Int32) -> list[Int32]:
        """The bits of a key tile's columns, a word per fragment, before there are scores."""
        if self.hooks.mask is None:
            return tile.fragment.inside(kv_first, self.fragments)
        words = cute.make_rmem_tensor((self.fragments,), Int32)
        self.ask(tile, kv_first, words)
        return [words[f] for f in range(self.fragments)]

    @cute.jit
    def ask(self, tile: cutlass.Constexpr[Tile], kv_first: Int32, words: cute.Tensor) -> None:
        """A mask hook, in a loop over fragments: written out, it would be most of what is compiled."""
        last = self.fragments - 1
        for f in cutlass.range(self.fragments, unroll=1):
            ((bits,),) = tile.fragment.allowed(self.hooks, kv_first + f * FRAGMENT)
            for before in range(last):
                words[before] = words[before + 1]
            words[last] = bits

    def taken(
        self, tile: Tile, place: Place, kv_first: Int32, words: list[Int32] | None
    ) -> tuple[list[list[Float32]], Float32 | None]:
        """Numbers that the softmax is taken of, by fragment, and the largest, if there is a softmax."""
        in_place = self.config.in_place
        if in_place == "none" or (in_place == "masked" and words is None):
            bits = words or [None] * self.fragments
            return self.take(
                place,
                lambda taken, f: self.modified(tile, tile.fragment, taken, kv_first + f * FRAGMENT, bits[f]),
            )
        self.modify(tile, place, kv_first, words)
        return self.take(place, lambda taken, f: numbers(taken))

    @cute.jit
    def modify(
        self,
        tile: cutlass.Constexpr[Tile],
        place: cutlass.Constexpr[Place],
        kv_first: Int32,
        words: cutlass.Constexpr[list[Int32] | None],
    ) -> None:
        """Scores of a tile with these bits, where they are, in a loop over pieces.

        Hooks that read tensors would be compiled for each column twice, with and without guarded reads. A
        loop cannot choose registers by its count, but it can choose columns of tensor memory.
        """
        columns = self.config.piece
        scores = cute.make_rmem_tensor((columns,), Float32)
        bits = cute.make_rmem_tensor((self.fragments,), Int32)
        masked, fragment = words is not None, self.anew(tile.fragment)
        for f in cutlass.range_constexpr(self.fragments if masked else 0):
            bits[f] = words[f]
        for p in cutlass.range(self.config.tile_n // columns, unroll=1):
            place.pieces.take(p, scores)
            cute.arch.fence_view_async_tmem_load()
            mine = bits[0] if masked else None
            put(scores, self.modified(tile, fragment, scores, kv_first + p * columns, mine))
            place.changed.put(p, scores)
            for f in cutlass.range_constexpr(self.fragments if masked else 0):
                after = bits[f + 1] if f + 1 < self.fragments else Int32(0)
                bits[f] = shifted(bits[f], after, columns)
        cute.arch.fence_view_async_tmem_store()

    def anew(self, fragment: Fragment) -> Fragment:
        """The fragment of a piece. Where no scores are modified in registers, what a row has is read at each
        step: kept, it would take registers beside a whole row of scores."""
        if self.config.in_place != "all":
            return fragment
        return self.fragment(fragment.at, computed_once(fragment.first_row), self.config.piece)

    def take(
        self, place: Place, looked_at: Callable[[cute.Tensor, int], list[Float32]]
    ) -> tuple[list[list[Float32]], Float32 | None]:
        """Numbers made of the scores, by fragment, and the largest. One half of a row is looked at while the
        other comes."""
        taken = cute.make_rmem_tensor((FRAGMENT, self.fragments), Float32)
        half = self.fragments // 2
        rows: list[list[Float32]] = []
        largest: Float32 | None = None
        self.load(place, taken, range(half))
        for some in (range(half), range(half, self.fragments)):
            cute.arch.fence_view_async_tmem_load()
            if not rows:
                self.load(place, taken, range(half, self.fragments))
            mine = [looked_at(taken[None, f], f) for f in some]
            if not self.hooks.elementwise:
                largest = self.largest_of([x for row in mine for x in row], largest)
            rows += mine
            if some.stop == half:
                compute_before(mine[-1][-1] if self.hooks.elementwise else largest)
        return rows, largest

    def load(self, place: Place, taken: cute.Tensor, some: range) -> None:
        for f in some:
            place.scores.take(f, taken[None, f])

    def modified(
        self, tile: Tile, fragment: Fragment, taken: cute.Tensor, first: Int32, bits: Int32 | None
    ) -> list[Float32]:
        """Numbers that the softmax is taken of, from q.k of a fragment from key `first` on: the variant's
        score, or what hides it."""
        row = self.scores(tile, taken, bits is not None)
        fragment.change(self.hooks, row, first, bits is not None)
        if bits is not None:
            fragment.mask(row, first, ((bits,),))
        return row.numbers

    def scores(self, tile: Tile, taken: cute.Tensor, masked: bool) -> Row:
        """q.k of what a product left in tensor memory."""
        return Row(taken)

    @cute.jit
    def raise_maximum(self, softmax: cutlass.Constexpr[LaneSoftmax], largest: Float32) -> None:
        """Raise the maximum in use where a score passes the ceiling, and say what that does to the output."""
        softmax.state.scale[0] = Float32(1.0)
        softmax.note([largest])
        if softmax.passes([largest]):
            softmax.raise_maxima([largest])

    @cute.jit
    def hand_scale(
        self,
        tile: cutlass.Constexpr[Tile],
        place: cutlass.Constexpr[Place],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        i: Int32,
    ) -> None:
        """To the correction warp, but for the first key tile. Without a branch, so that exponentials may
        begin meanwhile. Of elementwise weights, it learns that scores were read."""
        later = i > 0
        if const_expr(tile.softmax.online):
            cell = shared.scales.iterator + shared.scales.layout((place.row, place.scale))
            put_where(later, cell, tile.softmax.state.scale[0])
        cute.arch.sync_warp()
        arrive_where(later & (cute.arch.lane_idx() == 0), pipes.scale_full + 4 * place.scale + place.warp)

    def probabilities(
        self, tile: Tile, place: Place, rows: list[list[Float32]], pipes: Pipes, kv_first: Int32
    ) -> list[Pair]:
        """To tensor memory, by fragment; returns what is added to the row's total, which dropout has not
        seen."""
        pairs: list[Pair] = []
        softmax = tile.softmax
        moments = Moments() if softmax.online and softmax.state.moment is not None else None
        for f, row in enumerate(rows):
            found, used = self.weighed(softmax, row, f, moments)
            put = self.narrowed(used, place.kind)
            if tile.dropout is not None:
                tile.dropout.apply(put, kv_first + f * FRAGMENT)
            place.probabilities.put(f, put)
            pairs = self.gathered(pairs, found)
            self.handed_over(pipes, place, f)
        if moments is not None:
            moment = softmax.state.moment
            moment[0] = moment[0] + moments.total
        return pairs

    def narrowed(self, row: list[Pair], kind: Any) -> cute.Tensor:
        """Registers of probabilities of a fragment, rounded, as columns of tensor memory."""
        return narrowed(row, kind)

    def gathered(self, pairs: list[Pair], found: list[Pair]) -> list[Pair]:
        """Pairs of numbers that are added to the total at last, with those of another fragment."""
        return pairs + found

    def handed_over(self, pipes: Pipes, place: Place, f: int) -> None:
        """Tell that probabilities are there, after those of a fragment with which a part of them ends."""
        there = (f + 1) * FRAGMENT
        if there in (self.config.early_keys, self.config.tile_n):
            cute.arch.fence_view_async_tmem_store()
            barrier = pipes.p_early if there == self.config.early_keys else pipes.p_late
            self.cluster.arrive(barrier + place.stage)

    def weighed(
        self, softmax: Any, row: list[Float32], f: int, moments: Moments | None
    ) -> tuple[list[Pair], list[Pair]]:
        """Terms of the total of fragment f of a row, and its weights."""
        if self.hooks.rectified:
            return softpicked(softmax, row)
        found = self.exponentials(softmax, row, f, moments)
        return found, found

    def exponentials(self, softmax: Any, row: list[Float32], f: int, moments: Moments | None) -> list[Pair]:
        """Probabilities of fragment f of a row; elementwise weights as they are."""
        if not softmax.online:
            return paired(row)
        factor, shift = softmax.exponents(0)
        return exponentiate(row, factor, shift, self.config.exponential, f, moments)

    @cute.jit
    def finish(
        self,
        arguments: Arguments,
        work: Work,
        tile: cutlass.Constexpr[Tile],
        place: cutlass.Constexpr[Place],
        handed: cutlass.Constexpr[tuple[Shared, Pipes]],
        which: tuple[Int32, Int32],
    ) -> None:
        """Write the row's statistics, and hand over what its output is to be multiplied by at last."""
        (shared, pipes), (q, phase) = handed, which
        softmax = tile.softmax
        (finished,) = softmax.finish(logit_of(self.hooks, arguments, work.h))
        barrier = 4 * place.tile + place.warp
        cute.arch.mbarrier_wait(pipes.final_empty + barrier, phase ^ 1)
        if const_expr(softmax.online):
            scale = finished.scale
            if const_expr(tile.dropout is not None):
                scale = scale * tile.dropout.stream.remaining
            self.hand_last(shared, place, scale, softmax)
        arrive_once(pipes.final_full + barrier)
        if const_expr(arguments.max_logit is not None):
            largest = largest_of_warp(largest_seen(softmax, 0, q < work.q_len))
            put_largest(arguments, work.h, largest, cute.arch.lane_idx() == 0)
        if q < work.q_len:
            if const_expr(arguments.lse is not None):
                put_statistic(arguments.lse, work, q, finished.lse)
            if const_expr(arguments.max_scores is not None):
                of_row = softmax.state.largest[0] * softmax.factor
                put_statistic(arguments.max_scores, work, q, of_row * LN_2)
            if const_expr(arguments.entropy is not None):
                (entropy,) = softmax.entropies(logit_of(self.hooks, arguments, work.h))
                put_statistic(arguments.entropy, work, q, entropy)

    def hand_last(self, shared: Shared, place: Place, scale: Float32, softmax: Any) -> None:
        """Hand over the number that a row's output is multiplied by at last."""
        shared.finals[place.row, place.tile] = scale
