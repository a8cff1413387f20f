"""The warpgroup that hands on each step's dQ, as in one CTA alone. Of a CTA's 64 rows, two warps have the
first half of the columns, and two the second."""

from __future__ import annotations

from cutlass import Int32

from fa4flex.codegen.kernels.bwd_sm100 import reduce as alone
from fa4flex.codegen.kernels.bwd_sm100_pair.config import CTAS


class Reduce(alone.Reduce):
    def part(self, warp: Int32) -> Int32:
        """Each 32 rows are two: by columns."""
        return (self.cluster.rank() * CTAS + warp % 2) * 2 + warp // 2
