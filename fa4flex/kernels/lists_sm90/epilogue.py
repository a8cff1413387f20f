"""From accumulators to global memory: the output of dense or packed queries, or a split's part of it."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.packed_rows import Row
from fa4flex.kernels.decode_sm90 import epilogue as base


class Epilogue(base.Epilogue):
    @cute.jit
    def whole(
        self, arguments: Arguments, tile: Any, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        if const_expr(cute.rank(arguments.out) == 4):
            self.put(arguments.out[tile.b, row.q, row.h, None], out, row, lane)
        else:
            self.put(arguments.out[tile.q_offset + row.q, row.h, None], out, row, lane)
        if const_expr(arguments.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if row.exists and lane % 4 == 0:
                if const_expr(cute.rank(arguments.lse) == 3):
                    arguments.lse[tile.b, row.h, row.q] = lse
                else:
                    arguments.lse[row.h, tile.q_offset + row.q] = lse

    @cute.jit
    def part(
        self, arguments: Arguments, tile: Any, row: Row, out: cute.Tensor, lse: Float32, lane: Int32
    ) -> None:
        """Keys of packed queries are not split."""
        if const_expr(cute.rank(arguments.out) == 4):
            self.put_part(arguments, tile, row, out, lse, lane)

    def put_part(self, *given: Any) -> None:
        super().part(*given)

    def put(self, target: cute.Tensor, out: cute.Tensor, row: Row, lane: Int32) -> None:
        self.store(target, out, row.exists, lane)
