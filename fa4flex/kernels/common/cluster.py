"""The CTAs of a Blackwell kernel that multiply together: one alone, or a pair.

A pair's products are twice as high: each CTA holds its own rows of first operands and of results, and half of
each second operand, so that shared memory is read less. The first CTA of a pair issues the products for both;
barriers that its multiplying warp waits for lie with it, and what it signals is signalled to both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.common.tensor_core import arrive_once


@dataclass(frozen=True)
class Cluster:
    ctas: int

    @property
    def group(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE

    def layout(self, product: cute.TiledMma) -> cute.Layout:
        """(v, m, n, k), v being a CTA's place in its pair."""
        return cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (product.thr_id.shape,))

    def rank(self) -> Any:
        """A CTA's place in its pair."""
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if self.ctas == 2 else Int32(0)

    def leads(self) -> Any:
        """True if this CTA issues the products."""
        return self.rank() == 0 if self.ctas == 2 else Boolean(True)

    def commit(self, barrier: cute.Pointer) -> None:
        """An arrival, in each CTA, once all products issued so far are done."""
        with cute.arch.elect_one():
            if self.ctas == 2:
                tcgen05.commit(barrier, 0b11, self.group)
            else:
                tcgen05.commit(barrier)

    @cute.jit
    def expect(self, barrier: cutlass.Constexpr[cute.Pointer], size: cutlass.Constexpr[int]) -> None:
        """A warp's, for a copy of so many bytes in each CTA: the first one's barrier counts them all."""
        if self.leads():
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size * self.ctas)

    def arrive(self, barrier: cute.Pointer) -> None:
        """One arrival for the warp, after what all of its lanes did, at the multiplying warp's barrier."""
        arrive_once(barrier, first=self.ctas == 2)

    @cute.jit
    def depart(self) -> None:
        """Nobody ends while its pair may still signal it."""
        if const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
