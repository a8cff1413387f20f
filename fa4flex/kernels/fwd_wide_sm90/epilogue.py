"""From accumulators to global memory: half of the columns of the output, or of a split's part of it."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.combine.workspace import log_sums, outputs
from fa4flex.kernels.combine.workspace import row_number as number_of
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.fragment import rows_and_columns
from fa4flex.kernels.common.products import ROWS
from fa4flex.kernels.common.row_chunks import chunks_of, put_chunks
from fa4flex.kernels.common.same_rows import add_totals, row_number
from fa4flex.kernels.common.softmax import multiply_rows, sink_of
from fa4flex.kernels.fwd_sm90 import epilogue as forward
from fa4flex.kernels.fwd_wide_sm90.config import Config
from fa4flex.kernels.fwd_wide_sm90.roles import SUMS


class Epilogue(forward.Epilogue):
    """The first warpgroup writes what rows have besides columns."""

    config: Config

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        mine: cutlass.Constexpr[Any],
        tile: cutlass.Constexpr[Any],
        lane: Int32,
    ) -> None:
        work, unit, softmax = mine.work, mine.group, tile.softmax
        rows = [(softmax, r) for r in range(softmax.state.rows)]
        add_totals(tile.shared.sums, unit, lane, rows, SUMS)
        row = work.tile * ROWS + row_number(lane, 0)
        head = self.rows.place(work, row)[0].h
        out = rows_and_columns(mine.products.out)
        if const_expr(not self.config.splits):
            finished = softmax.finish(sink_of(arguments, head))
            multiply_rows(out, [one.scale for one in finished])
            if unit == 0:
                self.statistics(arguments, work, row, lane, finished, softmax)
            self.put(arguments, work, out, row, unit, lane, False)
        else:
            # Sinks join here where one block has all keys; otherwise where splits are merged.
            finished = softmax.finish(sink_of(arguments, head, work.alone))
            multiply_rows(out, [one.scale for one in finished])
            if work.alone:
                if unit == 0:
                    self.statistics(arguments, work, row, lane, finished, softmax)
                self.put(arguments, work, out, row, unit, lane, False)
            else:
                if unit == 0:
                    self.log_sums(arguments, work, row, lane, [one.lse for one in finished])
                self.put(arguments, work, out, row, unit, lane, True)

    @cute.jit
    def log_sums(
        self, arguments: Arguments, work: Any, row: Int32, lane: Int32, lse: cutlass.Constexpr[list[Float32]]
    ) -> None:
        """Logarithms of a part's sums, by one lane of four."""
        for r in cutlass.range_constexpr(len(lse)):
            mine = row + 8 * r
            if mine < self.rows.count(work):  # noqa: SIM102  compiled as branches
                if lane % 4 == 0:
                    head, q = self.rows.place(work, mine)
                    log_sums(arguments)[work.split, number_of(arguments, head.b, head.h, q)] = lse[r]

    @cute.jit
    def put(
        self,
        arguments: Arguments,
        work: Any,
        out: cute.Tensor,
        row: Int32,
        unit: Int32,
        lane: Int32,
        part: cutlass.Constexpr[bool],
    ) -> None:
        """A warpgroup's columns of a thread's rows, which end where the sequence does, or of a `part` of
        them. unit: number of the warpgroup."""
        for r in cutlass.range_constexpr(2):
            kind = Float32 if const_expr(part) else arguments.out.element_type
            first = unit * self.config.columns
            chunks = [one._replace(column=one.column + first) for one in chunks_of(out[r, None], kind, lane)]
            mine = row + 8 * r
            if mine < self.rows.count(work):
                head, q = self.rows.place(work, mine)
                if const_expr(part):
                    number = number_of(arguments, head.b, head.h, q)
                    put_chunks(outputs(arguments)[work.split, number, None], chunks)
                elif const_expr(cute.rank(arguments.out) == 4):
                    put_chunks(arguments.out[head.b, q, head.h, None], chunks)
                else:
                    put_chunks(arguments.out[head.q_offset + q, head.h, None], chunks)
