"""From accumulators to global memory: the output, or a split's part of it."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, select_

from fa4flex.kernels.combine.workspace import entropies, log_sums, outputs, row_number
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.fragment import rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.max_logit import largest_seen, put_largest
from fa4flex.kernels.common.packed_rows import Row, Tile
from fa4flex.kernels.common.pointwise import apply_output, one_row, quad_channels
from fa4flex.kernels.common.row_chunks import chunks_of, put_chunks
from fa4flex.kernels.common.softmax import Finished, logit_of, multiply_rows
from fa4flex.kernels.decode_sm90.config import Config


@cute.jit
def put_entropy(arguments: Arguments, tile: Tile, row: Row, entropy: Float32) -> None:
    """Write the entropy of a row that exists, or of a split's part of its keys."""
    if tile.alone:
        arguments.entropy[tile.b, row.h, row.q] = entropy
    else:
        entropies(arguments)[tile.split, row_number(arguments, tile.b, row.h, row.q)] = entropy


class Epilogue:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        tile: Tile,
        products: cutlass.Constexpr[Any],
        rows: cutlass.Constexpr[tuple[Any, ...]],
        lane: Int32,
    ) -> None:
        """Sinks join here where one block has all keys; otherwise where splits are merged."""
        if const_expr(arguments.max_logit is not None):
            for mine in rows:
                self.largest(arguments, mine, lane)
        out, finished = self.finished(arguments, products, rows, tile.alone)
        if const_expr(arguments.entropy is not None):
            for mine in rows:
                self.entropy(arguments, tile, mine, lane)
        for r in cutlass.range_constexpr(len(rows)):
            if tile.alone:
                self.apply(arguments, rows[r], out[r, None], lane)
                self.whole(arguments, tile, rows[r].row, out[r, None], finished[r].lse, lane)
            else:
                self.part(arguments, tile, rows[r].row, out[r, None], finished[r].lse, lane)

    def finished(
        self, arguments: Arguments, products: Any, rows: tuple[Any, ...], alone: Boolean
    ) -> tuple[cute.Tensor, list[Finished]]:
        """Rows of the output, divided by their sums, and what else is known of them then. alone: no other
        block or warp has keys of theirs, so that sinks join here."""
        finished: list[Finished] = []
        for mine in rows:
            finished += mine.softmax.finish(logit_of(self.hooks, arguments, mine.row.h, alone))
        out = rows_and_columns(products.out)
        multiply_rows(out, [mine.scale for mine in finished])
        return out, finished

    @cute.jit
    def entropy(self, arguments: Arguments, tile: Tile, mine: cutlass.Constexpr[Any], lane: Int32) -> None:
        """A row's entropy, or that of a split's keys."""
        (entropy,) = mine.softmax.entropies(logit_of(self.hooks, arguments, mine.row.h, tile.alone))
        if mine.row.exists and lane % 4 == 0:
            put_entropy(arguments, tile, mine.row, entropy)

    @cute.jit
    def largest(self, arguments: Arguments, mine: cutlass.Constexpr[Any], lane: Int32) -> None:
        """A row's part in the largest score of its head, by one lane of four."""
        largest = mine.softmax.reduce(largest_seen(mine.softmax, 0, mine.row.exists), cute.arch.fmax)
        put_largest(arguments, mine.row.h, largest, lane % 4 == 0)

    @cute.jit
    def apply(
        self, arguments: Arguments, mine: cutlass.Constexpr[Any], out: cute.Tensor, lane: Int32
    ) -> None:
        """The output function of a row, if there is one."""
        if const_expr(self.hooks.output is not None):
            grid = one_row(out)
            places = quad_channels(mine.fragment.at, mine.row.q, grid, lane, (0,))
            apply_output(self.hooks, places, grid, arguments.out.shape[3])

    @cute.jit
    def whole(
        self, arguments: Arguments, tile: Tile, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        if const_expr(arguments.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if row.exists and lane % 4 == 0:
                arguments.lse[tile.b, row.h, row.q] = lse
        self.store(arguments.out[tile.b, row.q, row.h, None], out, row.exists, lane)

    @cute.jit
    def part(
        self, arguments: Arguments, tile: Tile, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        """A split without keys has no output: nobody reads it."""
        if const_expr(self.hooks.elementwise):
            lse = Float32(select_(tile.first < tile.last, Float32(0.0), -Float32.inf))
        number = row_number(arguments, tile.b, row.h, row.q)
        if row.exists and lane % 4 == 0:
            log_sums(arguments)[tile.split, number] = lse
        some = row.exists & (tile.first < tile.last)
        self.store(outputs(arguments)[tile.split, number, None], out, some, lane)

    @cute.jit
    def store(self, target: cute.Tensor, out: cute.Tensor, exists: Boolean, lane: Int32) -> None:
        """A row, by all lanes of a warp."""
        chunks = chunks_of(out, target.element_type, lane)
        if exists:
            put_chunks(target, chunks)
