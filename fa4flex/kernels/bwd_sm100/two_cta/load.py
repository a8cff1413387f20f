"""The warp that brings a pair's operands.

Each CTA of a pair brings its own part, and the first one's barriers count both. Operands that products take
half of by rows and half of by columns come twice: by rows, and transposed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import cute

from fa4flex.kernels.bwd_sm100 import load as base
from fa4flex.kernels.bwd_sm100.two_cta.roles import LOADS
from fa4flex.kernels.common.transfer import Views


class Transfers(NamedTuple):
    """q, k, v, dout: as of one CTA alone; with _t, the first two modes are exchanged."""

    q: Any
    k: Any
    v: Any
    dout: Any
    q_t: Any
    k_t: Any
    dout_t: Any


class Load(base.Load):
    loads = LOADS

    def once(self, transfer: Any, views: Views, full: cute.Pointer) -> None:
        to_shared, from_global = views
        self.cluster.expect(full, cute.size_in_bytes(to_shared.element_type, to_shared.layout))
        cute.copy(transfer.atom, from_global, to_shared, tma_bar_ptr=full)
