"""Epilogue, from a warp's sums to global memory: warps that shared keys are merged, then written as an
output, or as a split's part of one."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.combine.workspace import log_sums, outputs, row_number
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.common.fragment import quad_reduce
from fa4flex.kernels.common.packed_rows import Row, Tile
from fa4flex.kernels.common.softmax import finish_row, finite, sink_of
from fa4flex.kernels.decode_fp8_sm90.config import ROWS, WARPS, WEIGHT, Config
from fa4flex.kernels.decode_fp8_sm90.resources import Shared
from fa4flex.kernels.decode_fp8_sm90.roles import MEET
from fa4flex.kernels.decode_sm90.consumer import OFFSETS

FOUR = 4
"""Numbers that a lane copies at once."""


class Merged(NamedTuple):
    """A row of the warps that share its keys: sums of each (width), weights of these, and the log-sum-exp of
    all."""

    sums: list[cute.Tensor]
    weights: list[Float32]
    lse: Float32


class Epilogue:
    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        tile: Tile,
        shared: cutlass.Constexpr[Shared],
        warp: cutlass.Constexpr[Any],
    ) -> None:
        """Rows that exist are shared out to the warps."""
        lane = cute.arch.lane_idx()
        self.meet()  # all bytes are read
        for r in cutlass.range_constexpr(len(OFFSETS)):
            total = quad_reduce(warp.rows[r].softmax.state.total[0], operator.add)
            if warp.rows[r].row.exists:
                self.leave(shared, warp, r, total)
        self.meet()
        count = cutlass.min(tile.rows, Int32(ROWS * self.config.row_warps))
        for number in cutlass.range(warp.number, count, WARPS, unroll=1):
            # The last slice has fewer heads.
            exists = True if self.config.slice_rows == 0 else tile.row(number).exists
            if exists:
                self.write(arguments, tile, shared, number, lane)

    def meet(self) -> None:
        sync(MEET)

    @cute.jit
    def leave(
        self,
        shared: cutlass.Constexpr[Shared],
        warp: cutlass.Constexpr[Any],
        r: cutlass.Constexpr[int],
        total: Float32,
    ) -> None:
        """A row's shift, total and output, for whoever merges it."""
        lane = cute.arch.lane_idx()
        place = lane // 4 + OFFSETS[r]
        shift, values = warp.rows[r].softmax.state.shift_to_merge(), warp.values
        if lane % 4 == 0:
            mine = shared.states[warp.number, place, None]
            factor = warp.v_scale.whole * warp.largest[0] * (1 / WEIGHT)
            for i, x in enumerate((shift, total, factor, Float32(0.0))):
                mine[i] = x
        width = values.width
        for block in cutlass.range_constexpr(values.count):
            for e in cutlass.range_constexpr(2):
                first = block * width + (lane % 4 * 2 + e) * values.run
                fours = cute.logical_divide(shared.sums[warp.number, place, None], cute.make_layout(FOUR))
                for n in cutlass.range_constexpr(values.run // FOUR):
                    four = cute.make_rmem_tensor((FOUR,), Float32)
                    for i in cutlass.range_constexpr(FOUR):
                        four[i] = warp.out[r, 2 * (block * values.run + n * FOUR + i) + e]
                    cute.autovec_copy(four, fours[None, first // FOUR + n])

    @cute.jit
    def write(
        self,
        arguments: Arguments,
        tile: Tile,
        shared: cutlass.Constexpr[Shared],
        number: Int32,
        lane: Int32,
    ) -> None:
        """One row: sinks join here where one block has all keys, otherwise where splits are merged."""
        row, sharers = tile.row(number), self.config.key_warps
        place, first = number % ROWS, number // ROWS * sharers
        states = [shared.states[first + i, place, None] for i in range(sharers)]
        common = states[0][0]
        for state in states[1:]:
            common = cute.arch.fmax(common, state[0])
        shift = finite(common)
        parts = [cute.math.exp2(state[0] - shift, fastmath=True) for state in states]
        total = Float32(0.0)
        for part, state in zip(parts, states):
            total = total + part * state[1]
        sink = sink_of(arguments, row.h, tile.alone)
        scale, lse = finish_row(common, shift, total, sink)
        weights = [part * state[2] * scale for part, state in zip(parts, states)]
        merged = Merged([shared.sums[first + i, place, None] for i in range(sharers)], weights, lse)
        if tile.alone:
            if const_expr(arguments.lse is not None):  # noqa: SIM102  decided when compiled, and when run
                if lane == 0:
                    arguments.lse[tile.b, row.h, row.q] = lse
            self.store(arguments.out[tile.b, row.q, row.h, None], merged, lane)
        else:
            self.part(arguments, tile, row, merged, lane)

    @cute.jit
    def part(
        self,
        arguments: Arguments,
        tile: Tile,
        row: Row,
        merged: cutlass.Constexpr[Merged],
        lane: Int32,
    ) -> None:
        """A split without keys has no output: nobody reads it."""
        number = row_number(arguments, tile.b, row.h, row.q)
        if lane == 0:
            log_sums(arguments)[tile.split, number] = merged.lse
        if tile.first < tile.last:
            self.store(outputs(arguments)[tile.split, number, None], merged, lane)

    @cute.jit
    def store(self, target: cute.Tensor, merged: cutlass.Constexpr[Merged], lane: Int32) -> None:
        kind, width = target.element_type, cute.size(target)
        fours = cute.logical_divide(target, cute.make_layout(FOUR))
        for start in cutlass.range_constexpr(0, self.config.head_dim_v, 32 * FOUR):
            piece = start // FOUR + lane
            if piece * FOUR < width:
                total = cute.make_rmem_tensor((FOUR,), Float32)
                total.fill(0.0)
                for one, weight in zip(merged.sums, merged.weights):
                    held = cute.make_rmem_tensor((FOUR,), Float32)
                    cute.autovec_copy(cute.logical_divide(one, cute.make_layout(FOUR))[None, piece], held)
                    for i in cutlass.range_constexpr(FOUR):
                        total[i] = total[i] + held[i] * weight
                rounded = cute.make_rmem_tensor((FOUR,), kind)
                rounded.store(total.load().to(kind))
                cute.autovec_copy(rounded, fours[None, piece])
