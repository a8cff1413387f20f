"""Sums and maxima of natural numbers over the threads of a block."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute, select_

from fa4flex.kernels.sequences.config import WARPS


def _combined(a: Int32, b: Int32, kind: str) -> Int32:
    return a + b if kind == "sum" else cutlass.max(a, b)


@cute.jit
def scan(
    mine: Int32, kind: cutlass.Constexpr[str], totals: cute.Tensor, thread: Int32
) -> tuple[Int32, Int32]:
    """(of all threads up to this one, of all threads): "sum" or "max" of a number >= 0 of each thread.

    totals int32 [WARPS] in shared memory. All threads of the block take part.
    """
    lane, warp = thread % 32, thread // 32
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(mine, offset=1 << step, mask_and_clamp=0)
        mine = select_(lane >= (1 << step), _combined(mine, other, kind), mine)
    cute.arch.sync_threads()  # nobody reads what another scan left there
    if lane == 31:
        totals[warp] = mine
    cute.arch.sync_threads()
    before, whole = Int32(0), Int32(0)
    for other in cutlass.range(WARPS, unroll=1):
        total = totals[other]
        before = select_(other < warp, _combined(before, total, kind), before)
        whole = _combined(whole, total, kind)
    return _combined(before, mine, kind), whole
