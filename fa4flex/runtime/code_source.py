"""Keys and values that are codes of 8 bits, with queries that are codes, as kernels read them.

Shapes are those of what the codes stand for: transposed values come twice, as kernels read them, and as a
view of the shape that all checks and keys of launches are about.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.kernels.plan.keys import Codes, Keys, of_codes
from fa4flex.runtime.key_sources import QKV, Contiguous, KeySource


class _Coded(NamedTuple):
    k: Tensor
    v: Tensor
    columns: Tensor | None
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor | None
    q_bias: Tensor | None
    v_offset: Tensor | None
    first_tiles: Tensor | None
    promote: bool = True


class Coded(_Coded, KeySource):
    """k, v as of Contiguous; k of int8 or e4m3.

    columns       e4m3 [B, Hkv, Dv, length], packed [Hkv, Dv, length]: what v is a view of, see Quantized;
                  None for 16-bit values
    q_scale, q_bias   float32 [B, Hq, Sq], packed [Hq, Tq]: q stands for its codes times q_scale, and
                  q.k for q_bias more; None for 0
    k_scale       float32 [B, Hkv, tiles], packed [Hkv, tiles]: of TILE keys each
    v_scale, v_offset   float32 [sequences, Hkv, Dv]; None for 1 and 0
    first_tiles   int32 [sequences + 1]: the tile of scales with which each packed sequence begins
    promote       see Codes
    """

    __slots__ = ()
    values = ("promote",)

    def keys(self, rows: int) -> Keys:
        pv = str(self.v.dtype).removeprefix("torch.")
        qk = str(self.k.dtype).removeprefix("torch.")
        biased, offset = self.q_bias is not None, self.v_offset is not None
        packed = self.first_tiles is not None
        return of_codes(Codes(qk, pv, biased, offset, packed, self.promote))  # type: ignore[arg-type]

    def fits(self, q: Tensor, varlen: object) -> None:
        """Whoever quantised has checked."""

    def stand_in(self, q: Tensor, heads_first: bool) -> QKV:
        like = q.new_empty(1, dtype=torch.bfloat16)
        of_q, k, v = (like.expand(x.shape) for x in (q, self.k, self.v))
        return Contiguous(k, v).stand_in(of_q, heads_first)
