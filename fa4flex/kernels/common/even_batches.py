"""Splits of sequences whose lengths the device alone knows.

Blocks of long sequences would keep a launch waiting, and so the keys of uneven batches are split more than
those of even ones, which lose by it: partial outputs are written and merged. The host knows a batch's longest
possible sequence only, and hands both numbers over.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from fa4flex.kernels.common.keys import NEVER

TOLERANCE = 1 / 16
"""The longest sequence of an even batch is longer than the mean by at most this share of it."""


@cute.jit
def splits_of(arguments: Any) -> Int32:
    """Splits of each sequence. All warps of all kernels of a launch find the same; a warp calls this."""
    splits, even = Int32(arguments.splits), Int32(arguments.even_splits)
    lengths = arguments.seqused_k if arguments.used_keys is None else arguments.used_keys
    if const_expr(lengths is not None):  # noqa: SIM102  one is decided when compiled, one when run
        if even < splits:  # noqa: SIM102  lengths are read only where it matters
            if is_even(lengths, Int32(arguments.out.shape[0])):
                splits = even
    return splits


@cute.jit
def is_even(lengths: cute.Tensor, batch: Int32) -> Boolean:
    """True if no sequence is much longer than the mean. A warp calls this."""
    longest, total = Int32(0), Float32(0.0)
    for b in cutlass.range(cute.arch.lane_idx(), batch, 32, unroll=4):
        # Impossible lengths are reported elsewhere.
        length = Int32(cutlass.max(cutlass.min(Int64(lengths[b]), Int64(NEVER)), Int64(0)))
        longest = cutlass.max(longest, length)
        total = total + length.to(Float32)
    for distance in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << distance)
    longest = cute.arch.warp_redux_sync(longest, "max")
    return longest.to(Float32) * batch.to(Float32) <= total * Float32(1 + TOLERANCE)
