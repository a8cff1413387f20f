"""From a warpgroup's accumulators to the output, its tangent, and both of the log-sum-exp."""

from __future__ import annotations

import operator
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.fragment import rows_and_columns, thread_here
from fa4flex.kernels.common.products import ROWS
from fa4flex.kernels.common.softmax import Finished, OnlineSoftmax, multiply_rows, sink_of
from fa4flex.kernels.common.work import put_statistic
from fa4flex.kernels.fwd_sm90 import epilogue as forward
from fa4flex.kernels.jvp_sm90.config import Config


class Epilogue(forward.Epilogue):
    """Rows go straight from registers to global memory."""

    config: Config

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        mine: cutlass.Constexpr[Any],
        tile: cutlass.Constexpr[Any],
        lane: Int32,
    ) -> None:
        """Part of a tile of queries that a warpgroup has. With Z the denominator, and r what is pushed,
        the tangent of the output is its accumulator / Z - output * r / Z."""
        work, lane, softmax = mine.work, thread_here() % 128, tile.softmax
        row = work.tile * self.config.tile_m + mine.group * ROWS + lane // 32 * 16 + lane % 32 // 4
        finished = softmax.finish(sink_of(arguments, work.h))
        self.statistics(arguments, work, row, lane, finished, softmax)
        out, tout = rows_and_columns(mine.products.out), rows_and_columns(mine.products.tout)
        multiply_rows(out, [one.scale for one in finished])
        multiply_rows(tout, [one.scale for one in finished])
        falls, rises = self.tangents(softmax, finished)
        if const_expr(self.config.scores_move):
            for r, fall in enumerate(falls):
                tangent = tout[r, None]
                tangent.store(tangent.load() - out[r, None].load() * fall)
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(len(rises)):
                if row + 8 * r < self.rows.count(work):
                    put_statistic(arguments.tlse, work, row + 8 * r, rises[r])
        self.store_rows(arguments.out, work, out, row, lane)
        self.store_rows(arguments.tout, work, tout, row, lane)

    def tangents(self, softmax: OnlineSoftmax, finished: list[Finished]) -> tuple[list[Any], list[Any]]:
        """Factors of the output in its tangent, by row, and the tangent of the log-sum-exp. With c
        the centre and s the share of the keys beside a sink: r / Z + c (s - 1), and r / Z + c s."""
        state: Any = softmax.state
        falls, rises = [], []
        for r, one in enumerate(finished):
            fall = softmax.reduce(state.pushed[r], operator.add) * one.scale
            rise = fall + state.centre[r]
            if self.config.sinks:
                share = softmax.reduce(state.total[r], operator.add) * one.scale
                rise = fall + state.centre[r] * share
                fall = rise - state.centre[r]
            falls.append(fall)
            rises.append(rise)
        return falls, rises

    def drain(self) -> None:
        """Nothing leaves by TMA."""
