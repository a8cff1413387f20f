"""Epilogue: the output of dense or packed queries, or a split's part of it."""

from __future__ import annotations

from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.packed_rows import Row
from fa4flex.kernels.decode_sm100 import epilogue as base
from fa4flex.kernels.lists.tiles import ListTile


class Epilogue(base.Epilogue):
    def target(self, arguments: Arguments, tile: ListTile, row: Row) -> cute.Tensor:  # type: ignore[override]
        """A row of the output."""
        return row_of(arguments.out, tile, row)

    def put_lse(self, arguments: Arguments, tile: ListTile, row: Row, lse: Float32) -> None:  # type: ignore[override]
        if cute.rank(arguments.lse) == 3:
            arguments.lse[tile.b, row.h, row.q] = lse
        else:
            arguments.lse[row.h, tile.q_offset + row.q] = lse

    # Keys of packed queries are not split: they have no place for parts.

    def put_part(  # type: ignore[override]
        self, arguments: Arguments, tile: ListTile, row: Row, total: cute.Tensor, column: Int32
    ) -> None:
        if const_expr(cute.rank(arguments.out) == 4):
            super().put_part(arguments, tile, row, total, column)  # type: ignore[arg-type]

    def put_part_lse(self, arguments: Arguments, tile: ListTile, row: Row, lse: Float32) -> None:  # type: ignore[override]
        if const_expr(cute.rank(arguments.out) == 4):
            super().put_part_lse(arguments, tile, row, lse)  # type: ignore[arg-type]


def row_of(x: cute.Tensor, tile: ListTile, row: Row) -> cute.Tensor:
    """A row of queries or of the output, dense or packed."""
    if cute.rank(x) == 4:
        return x[tile.b, row.q, row.h, None]
    return x[tile.q_offset + row.q, row.h, None]
