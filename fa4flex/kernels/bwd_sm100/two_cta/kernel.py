"""The Blackwell backward kernel of pairs of CTAs: descriptors and launch on the host, and on the device the
split into roles. A pair has 256 keys, 128 per CTA; products span both.

load warp --[k, v, k_t once]----------------------> multiply warp <--(S, dP; P, dS)--> compute --> dk, dv
          --[q, q_t, dout, dout_t rings]----------> of the first       |   ^
          --[lse2, delta rings]-----------------------------------------+  |
                                (dQ)--> reduce --> dq_sum                   +--(dS)--> the other CTA
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4flex.kernels.bwd_sm100 import kernel as base
from fa4flex.kernels.bwd_sm100.resources import Products
from fa4flex.kernels.bwd_sm100.two_cta.compute import Compute
from fa4flex.kernels.bwd_sm100.two_cta.config import KEPT
from fa4flex.kernels.bwd_sm100.two_cta.load import Load, Transfers
from fa4flex.kernels.bwd_sm100.two_cta.mma import Mma
from fa4flex.kernels.bwd_sm100.two_cta.reduce import Reduce
from fa4flex.kernels.bwd_sm100.two_cta.resources import Shared
from fa4flex.kernels.bwd_sm100.two_cta.roles import barrier_table
from fa4flex.kernels.common.backward import BackwardArguments
from fa4flex.kernels.common.transfer import reordered


class Backward(base.Backward):
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    roles = Load, Mma, Compute, Reduce
    transfers_kind = Transfers
    barrier_table = staticmethod(barrier_table)
    operands = (*base.Backward.operands, "q_t", "k_t", "dout_t")

    def whole(self, name: str, arguments: BackwardArguments) -> cute.Tensor:
        rows = super().whole(name.removesuffix("_t"), arguments)
        return reordered(rows, [1, 0, *range(2, cute.rank(rows))]) if name.endswith("_t") else rows

    def shared(self, storage: Any, products: Products) -> Shared:
        # A key's queries lie next to each other, in a row of the swizzle.
        rows = cute.make_layout((KEPT, self.config.tile_n), stride=(1, KEPT))
        return Shared(**self.tensors(storage, products, rows), sent=storage.ds.data_ptr())
