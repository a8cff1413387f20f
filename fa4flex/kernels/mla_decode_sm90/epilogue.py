"""From accumulators to global memory: half of the columns of the output, or of a split's part of it."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.combine.workspace import log_sums, outputs, row_number
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Row
from fa4flex.kernels.decode_sm90 import epilogue as base
from fa4flex.kernels.mla_decode_sm90.config import PIECE, Config


class Epilogue(base.Epilogue):
    """unit: number of the warpgroup; the first one writes what rows have besides columns."""

    def __init__(self, config: Config, hooks: Hooks, unit: int) -> None:
        super().__init__(config, hooks)  # type: ignore[arg-type]
        self.unit = unit
        self.columns = config.own * PIECE

    def half(self, row: cute.Tensor) -> cute.Tensor:
        """The columns of this warpgroup."""
        return cute.logical_divide(row, cute.make_layout(self.columns))[None, self.unit]

    @cute.jit
    def whole(
        self, arguments: Arguments, tile: Any, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        if const_expr(arguments.lse is not None and self.unit == 0):  # noqa: SIM102  compiled, run
            if row.exists and lane % 4 == 0:
                arguments.lse[tile.b, row.h, row.q] = lse
        self.store(self.half(arguments.out[tile.b, row.q, row.h, None]), out, row.exists, lane)

    @cute.jit
    def part(
        self, arguments: Arguments, tile: Any, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        """A split without keys has no output: nobody reads it."""
        number = row_number(arguments, tile.b, row.h, row.q)
        if const_expr(self.unit == 0):  # noqa: SIM102  one is decided when compiled, one when run
            if row.exists and lane % 4 == 0:
                log_sums(arguments)[tile.split, number] = lse
        some = row.exists & (tile.first < tile.last)
        self.store(self.half(outputs(arguments)[tile.split, number, None]), out, some, lane)
