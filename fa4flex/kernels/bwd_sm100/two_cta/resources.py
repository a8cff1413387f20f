"""Resources of the roles of a pair's backward kernel: tensors."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from fa4flex.kernels.bwd_sm100 import resources as base


@dataclass(frozen=True)
class Shared(base.Shared):
    """Shared memory of one CTA of a pair, as of one CTA alone, but q_t, k_t and dout_t have bytes of their
    own, and ds_rows is (queries of which this CTA makes dQ, keys of the pair). sent: those bytes, for the
    other CTA to write."""

    sent: cute.Pointer
