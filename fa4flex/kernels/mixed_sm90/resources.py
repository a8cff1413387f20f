"""Resources of the roles of the Hopper kernel for mixed batches."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from fa4flex.kernels.fwd_sm90 import resources as forward


@dataclass(frozen=True)
class Shared(forward.Shared):
    """Besides: what the second warpgroup hands to the first of few rows: `sums`, the output, over the
    queries, which are not needed any more (thread, number), and `kept` (row, number)."""

    sums: cute.Tensor
    kept: cute.Tensor
