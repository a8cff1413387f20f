"""The warpgroup that hands on each step's dQ, as in one CTA alone. Of a CTA's 64 rows, two warps have the
first half of the columns, and two the second."""

from __future__ import annotations

from collections.abc import Callable

from cutlass import Int32

from fa4flex.codegen.kernels.bwd_sm100 import reduce as alone
from fa4flex.codegen.kernels.bwd_sm100_pair.config import CTAS


class Reduce(alone.Reduce):
    def first_piece(self, warp: Int32, pieces: int) -> Callable[[Int32], Int32]:
        rows = self.cluster.rank() * CTAS + warp % 2
        place = rows * 2 * pieces + warp // 2 * pieces
        return lambda tile: tile * 4 * 2 * pieces + place
