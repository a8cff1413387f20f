"""The warpgroup that hands on each step's dQ, as in one CTA base. Of a CTA's 64 rows, two warps have the
first half of the columns, and two the second."""

from __future__ import annotations

from cutlass import Int32

from fa4flex.kernels.bwd_sm100 import reduce as base
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS


class Reduce(base.Reduce):
    def part(self, warp: Int32) -> Int32:
        """Each 32 rows are two: by columns."""
        return (self.cluster.rank() * CTAS + warp % 2) * 2 + warp // 2
