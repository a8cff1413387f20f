"""The consumer warps: bytes of keys and values become float16 in registers, products by mma.sync, softmax
between them.

A warp has ROWS query rows in registers, and all keys of a tile or every so-manieth part of them; it has its
own maxima and sums, and waits for no other warp. Which element of a row of keys is which of the product's
inner dimension does not matter as long as queries agree, nor which column of values is which of its outer
one: both are taken so that a lane reads whole runs of bytes, and no two lanes meet in a bank."""

from __future__ import annotations

from dataclasses import dataclass, field

import cutlass
from cutlass import Float16, Float32, Int32, const_expr, cute, pipeline, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.fragment import packed, quad_reduce
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, Tile, first_full, tile_of
from fa4flex.kernels.common.softmax import maxima, multiply_rows, passed, raise_maxima
from fa4flex.kernels.common.transfer import release
from fa4flex.kernels.decode_fp8_sm90.config import KEYS, ROWS, WEIGHT, Config
from fa4flex.kernels.decode_fp8_sm90.epilogue import Epilogue
from fa4flex.kernels.decode_fp8_sm90.instructions import interleaved, multiply, widened
from fa4flex.kernels.decode_fp8_sm90.queries import RegisterQueries, SharedQueries, load_queries
from fa4flex.kernels.decode_fp8_sm90.resources import Shared
from fa4flex.kernels.decode_fp8_sm90.scales import Scale, scale_of
from fa4flex.kernels.decode_fp8_sm90.tiles import KeyBytes, Place, ValueBytes
from fa4flex.kernels.decode_sm90 import consumer as base
from fa4flex.kernels.decode_sm90.consumer import OFFSETS, Mine

COLUMNS = KEYS // 4
"""Scores that a lane has of each of its two rows: of each 8 keys the two from 2 (lane % 4) on."""

LEAST_SCALE = 2.0**-100
"""Initial value of the largest scale of values so far."""


@dataclass(frozen=True)
class Warp:
    """Constants over a warp's key tiles, and its running sums.

    number     of the warp, which has rows `number // key_warps` and keys `number % key_warps` of a tile
    rows, lift   a lane's two rows, and what their products are multiplied by for scores
    queries    float16, in the order in which bytes of keys are read
    out        [row, columns]: values summed up, divided by nothing
    largest    [1]: the scale of values that those summed up so far were divided by
    """

    number: Int32
    tile: Tile
    rows: tuple[Mine, ...]
    lift: cute.Tensor
    queries: RegisterQueries | SharedQueries
    out: cute.Tensor
    largest: cute.Tensor
    k_scale: Scale
    v_scale: Scale
    keys: KeyBytes
    values: ValueBytes
    starts: cute.Tensor | None = field(default=None)


States = tuple[pipeline.PipelineState, pipeline.PipelineState]


class Consumer(base.Consumer):
    config: Config

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        self.width = KEYS
        self.epilogue = Epilogue(config)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        tile = tile_of(part, arguments, self.hooks, self.config)
        warp = self.warp(arguments, tile, shared)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        v_state = k_state.clone()
        full = first_full(tile)
        for i in cutlass.range(tile.first, full, unroll=1):
            k_state, v_state = self.visit(warp, pipes, i, (k_state, v_state), True)
        for i in cutlass.range(full, tile.last, unroll=1):
            k_state, v_state = self.visit(warp, pipes, i, (k_state, v_state), False)
        self.epilogue.run(arguments, tile, shared, warp)

    def warp(self, arguments: Arguments, tile: Tile, shared: Shared) -> Warp:
        config = self.config
        number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        lane = cute.arch.lane_idx()
        first = number // config.key_warps * ROWS + lane // 4
        k_scale = scale_of(arguments, "k", config.k_scales, tile, config.box_rows)
        v_scale = scale_of(arguments, "v", config.v_scales, tile, config.box_rows)
        rows = tuple(self.row(arguments, tile, first + offset, lane) for offset in OFFSETS)
        words, lift = load_queries(arguments, tile, rows, config.head_dim, lane)
        shares = config.shares_queries
        queries = SharedQueries(words, shared.q_address, number) if shares else RegisterQueries(words)
        for r in range(len(rows)):
            lift[r] = lift[r] * k_scale.whole
            rows[r].softmax.state.clear()
        out = cute.make_rmem_tensor((2, config.head_dim_v // 4), Float32)
        out.fill(0.0)
        largest = cute.make_rmem_tensor((1,), Float32)
        largest[0] = Float32(LEAST_SCALE) if v_scale.varies else Float32(1.0)
        warp = Warp(
            number,
            tile,
            rows,
            lift,
            queries,
            out,
            largest,
            k_scale,
            v_scale,
            KeyBytes.of(shared.k_address, config.head_dim, config, lane),
            ValueBytes.of(shared.v_address, config.head_dim_v, config, lane),
            None if self.hooks.start is None else cute.make_rmem_tensor((2, COLUMNS), Float32),
        )
        for scale in (k_scale, v_scale):
            scale.ask(self.columns(warp, tile.first, Int32(0)))
        return warp

    def columns(self, warp: Warp, i: Int32, step: Int32) -> Int32:
        """The first key of a lane's columns in a step of tile number i; of the tile after the last, of the
        last."""
        last = cutlass.max(cutlass.min(i, warp.tile.last - 1), Int32(0))
        return self.first_key(warp, tile_at(warp.tile.keys, last), step) + cute.arch.lane_idx() % 4 * 2

    def following(self, warp: Warp, i: Int32, step: Int32) -> Int32:
        """The first key of a lane's columns in the step after this one."""
        if not (warp.k_scale.varies or warp.v_scale.varies):
            return Int32(0)
        if self.config.steps == 1:
            return self.columns(warp, i + 1, step)
        over = step + 1 == self.config.steps
        return self.columns(warp, select_(over, i + 1, i), select_(over, Int32(0), step + 1))

    def first_key(self, warp: Warp, key_tile: Int32, step: Int32) -> Int32:
        config = self.config
        within = (warp.number % config.key_warps * config.steps + step) * KEYS
        return key_tile * config.tile_n + within

    @cute.jit
    def visit(
        self,
        warp: cutlass.Constexpr[Warp],
        pipes: cutlass.Constexpr[Pipes],
        i: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> States:
        """A key tile: all steps of it that this warp has. One of several has both tiles when it begins."""
        k_state, v_state = states
        pipes.k.consumer_wait(k_state)
        if const_expr(self.config.steps == 1):
            self.step(warp, pipes, i, Int32(0), states, masked)
        else:
            pipes.v.consumer_wait(v_state)
            for number in cutlass.range(self.config.steps, unroll=1):
                self.step(warp, pipes, i, number, states, masked)
            release(pipes.k, k_state)
            release(pipes.v, v_state)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def step(
        self,
        warp: cutlass.Constexpr[Warp],
        pipes: cutlass.Constexpr[Pipes],
        i: Int32,
        number: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Scores, softmax and values of KEYS keys of tile number i: step `number` of it."""
        k_state, v_state = states
        kv_first = self.first_key(warp, tile_at(warp.tile.keys, i), number)
        following = self.following(warp, i, number)
        grids, early = self.prepare(warp, kv_first, masked)
        self.score(warp, grids, (k_state.index, number))
        if const_expr(self.config.steps == 1):
            release(pipes.k, k_state)
        warp.k_scale.ask(following)
        for mine, grid, (known, allowed) in zip(warp.rows, grids, early):
            mine.fragment.modify(self.hooks, grid, known)
            if const_expr(masked):
                mine.fragment.mask(grid, kv_first, allowed)
        self.take_maxima(warp, grids)
        probabilities = self.probabilities(warp, grids)
        warp.v_scale.ask(following)
        if const_expr(self.config.steps == 1):
            pipes.v.consumer_wait(v_state)
        end = warp.rows[0].fragment.at.kv_len - kv_first if self.clears(masked) else None
        self.add_values(warp, probabilities, (v_state.index, number), end)
        if const_expr(self.config.steps == 1):
            release(pipes.v, v_state)

    def clears(self, masked: bool) -> bool:
        """True if keys may lie past the end of a sequence and hold anything; dense tensors end where TMA
        fills in zeros itself."""
        return masked and self.config.lengths != "dense"

    def prepare(self, warp: Warp, kv_first: Int32, masked: bool) -> tuple[list[cute.Tensor], list]:
        """Memory for the scores of each row, and what needs no scores."""
        scores = cute.make_rmem_tensor((2, COLUMNS), Float32)
        grids, early = [], []
        for r, mine in enumerate(warp.rows):
            if warp.starts is not None:
                mine.fragment.start(self.hooks, row_of(warp.starts, r), kv_first, masked)
            allowed = mine.fragment.allowed(self.hooks, kv_first) if masked else None
            early.append((mine.fragment.prepare(self.hooks, kv_first, masked), allowed))
            grids.append(row_of(scores, r))
        return grids, early

    def score(self, warp: Warp, grids: list[cute.Tensor], place: Place) -> None:
        """q.k of all rows and keys of a step."""
        queries, pairs = warp.queries, KEYS // 8
        sums = [[Float32(0.0)] * 4 for _ in range(pairs)]
        index = 0
        for words in warp.keys.chunks(place):
            for s in range(len(words[0])):
                a = queries.operand(index)
                for n in range(pairs):
                    sums[n] = multiply(sums[n], a, widened(words[n][s]))
                index += 1
        for r, grid in enumerate(grids):
            for c in range(COLUMNS):
                score = sums[c // 2][2 * r + c % 2] * warp.lift[r]
                if warp.k_scale.varies:
                    score = score * warp.k_scale.coming[c]
                if warp.starts is not None:
                    score = score + warp.starts[r, c]
                grid[0, c] = score

    @cute.jit
    def take_maxima(self, warp: cutlass.Constexpr[Warp], grids: cutlass.Constexpr[list]) -> None:
        """Raise the running maxima to this step's, and rescale the output, where a score passes a ceiling or
        a value's scale is larger than all before."""
        softmaxes = [mine.softmax for mine in warp.rows]
        found = maxima(softmaxes, grids)
        raised = passed(softmaxes, found)
        largest = warp.v_scale.largest()
        if const_expr(warp.v_scale.varies):
            raised = raised | cute.arch.vote_any_sync(largest > warp.largest[0])
        if raised:
            raise_all(warp, found, largest)

    def probabilities(self, warp: Warp, grids: list[cute.Tensor]) -> list[list[Int32]]:
        """Words of float16 of each row: probabilities, times scales of values and WEIGHT. The denominator has
        them as they were."""
        weights = [Float32(WEIGHT)] * COLUMNS
        if warp.v_scale.varies:
            inverse = Float32(WEIGHT) * cute.arch.rcp_approx(warp.largest[0])
            weights = [warp.v_scale.coming[c] * inverse for c in range(COLUMNS)]
        words = []
        for mine, grid in zip(warp.rows, grids):
            mine.softmax.exponentiate(grid)
            scaled = [grid[0, c] * weights[c] for c in range(COLUMNS)]
            words.append([packed(scaled[c], scaled[c + 1], Float16) for c in range(0, COLUMNS, 2)])
        return words

    def add_values(
        self, warp: Warp, probabilities: list[list[Int32]], place: Place, end: Int32 | None
    ) -> None:
        """out += p v of a step; past the `end` of a sequence values are taken for zeros."""
        out, column = warp.out, 0
        for block in range(warp.values.count):
            width = warp.values.run
            for pair in range(KEYS // 16):
                a = [probabilities[r][2 * pair + half] for half in (0, 1) for r in (0, 1)]
                near, far = warp.values.pairs(place, block, pair, end)
                for n, b in enumerate(zip(interleaved(*near), interleaved(*far))):
                    at = column + 2 * n
                    acc = [out[r, at + e] for r in (0, 1) for e in (0, 1)]
                    acc = multiply(acc, a, b)
                    for r in (0, 1):
                        for e in (0, 1):
                            out[r, at + e] = acc[2 * r + e]
            column += 2 * width


def raise_all(warp: Warp, found: list[list[Float32]], largest: Float32) -> None:
    """Take a step's maxima, and the largest scale of its values, into the running ones."""
    scales = raise_maxima([mine.softmax for mine in warp.rows], found)
    if warp.v_scale.varies:
        before = warp.largest[0]
        now = cute.arch.fmax(before, quad_reduce(largest, cute.arch.fmax))
        warp.largest[0] = now
        ratio = before * cute.arch.rcp_approx(now)
        scales = [scale * ratio for scale in scales]
    multiply_rows(warp.out, scales)


def row_of(scores: cute.Tensor, r: int) -> cute.Tensor:
    """A row as (1, column): the same registers."""
    row = scores[r, None]
    return cute.make_tensor(row.iterator, cute.prepend(row.layout, cute.make_layout(1)))
