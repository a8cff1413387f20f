"""Heads: grouped-query attention (arXiv:2305.13245), where `ratio` query heads share a KV head.

Query head h reads KV head h // ratio. Mods always see query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fa4flex.errors import InputError


def ratio(q_heads: int, kv_heads: int, enable_gqa: bool = True) -> int:
    """Query heads per KV head. `enable_gqa=False` requires 1, as torch's flex_attention does.

    Raises InputError where query heads are no multiple of KV heads.
    """
    if q_heads < 1 or kv_heads < 1:
        raise InputError(
            f"{q_heads} query heads, {kv_heads} KV heads", "at least one of each", "check the shapes"
        )
    if q_heads % kv_heads:
        raise InputError(
            f"{q_heads} query heads with {kv_heads} KV heads",
            "query heads a multiple of KV heads",
            "check the layout: heads are dimension 1 of bhsd and dimension 2 of bshd"
            if q_heads > kv_heads
            else "keys have more heads than queries: check that q and k are not swapped",
        )
    if q_heads != kv_heads and not enable_gqa:
        raise InputError(
            f"{q_heads} query heads with {kv_heads} KV heads and enable_gqa=False",
            "equal numbers of heads",
            "pass enable_gqa=True to share each KV head between query heads",
        )
    return q_heads // kv_heads


@dataclass(frozen=True)
class Heads:
    """Number of query and KV heads; the first is a multiple of the second."""

    q: int
    kv: int

    def __post_init__(self) -> None:
        ratio(self.q, self.kv)

    @property
    def ratio(self) -> int:
        return self.q // self.kv

    def kv_head(self, q_head: int) -> int:
        """The KV head that a query head reads."""
        return q_head // self.ratio

    def pack(self, x: Tensor) -> Tensor:
        """[B, Hq, ...] as [B, Hkv, ratio, ...], a view: query heads grouped by KV head."""
        if x.ndim < 2 or x.shape[1] != self.q:
            raise InputError(f"a tensor {list(x.shape)}", f"[B, {self.q}, ...]", "move heads to dimension 1")
        return x.unflatten(1, (self.kv, self.ratio))

    def unpack(self, x: Tensor) -> Tensor:
        """[B, Hkv, ratio, ...] as [B, Hq, ...]; a view of what `pack` returned."""
        if x.ndim < 3 or tuple(x.shape[1:3]) != (self.kv, self.ratio):
            raise InputError(
                f"a tensor {list(x.shape)}", f"[B, {self.kv}, {self.ratio}, ...]", "pack it first"
            )
        return x.flatten(1, 2)
