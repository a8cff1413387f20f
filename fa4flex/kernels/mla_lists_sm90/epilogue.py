"""From accumulators to global memory: half of the columns of the output of dense or packed queries, or of a
split's part of it."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.packed_rows import Row
from fa4flex.kernels.mla_decode_sm90 import epilogue as base


class Epilogue(base.Epilogue):
    @cute.jit
    def whole(
        self, arguments: Arguments, tile: Any, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        if const_expr(cute.rank(arguments.out) == 4):
            self.put_whole(arguments, tile, row, out, lse, lane)
        else:
            token = tile.q_offset + row.q
            if const_expr(arguments.lse is not None and self.unit == 0):  # noqa: SIM102  compiled, run
                if row.exists and lane % 4 == 0:
                    arguments.lse[row.h, token] = lse
            self.store(self.half(arguments.out[token, row.h, None]), out, row.exists, lane)

    @cute.jit
    def part(
        self, arguments: Arguments, tile: Any, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        """Keys of packed queries are not split."""
        if const_expr(cute.rank(arguments.out) == 4):
            self.put_part(arguments, tile, row, out, lse, lane)

    def put_whole(self, *given: Any) -> None:
        super().whole(*given)

    def put_part(self, *given: Any) -> None:
        super().part(*given)
