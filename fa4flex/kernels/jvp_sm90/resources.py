"""Resources of the roles of the Hopper kernel of attention and its tangents: tensors of one block, and what
moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from fa4flex.kernels.common import softmax
from fa4flex.kernels.common.products import Products


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, width, warpgroup), k (tile_n, head_dim, stage), v (head_dim_v, tile_n, stage),
    and their tangents, None for what has none."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    tq: cute.Tensor | None
    tk: cute.Tensor | None
    tv: cute.Tensor | None


@dataclass(frozen=True)
class Transfers:
    """TMA descriptors of q, k and v, and of their tangents, with the global tensors that they read: q, k (S,
    D, H, B), v (D, S, H, B); packed (T, D, H) and (D, T, H)."""

    q: Any
    k: Any
    v: Any
    tq: Any
    tk: Any
    tv: Any


@dataclass(frozen=True)
class TangentProducts(Products):
    """Besides: descriptors of tangents, None for what has none; pt, registers of probabilities times tangents
    of scores; and tout, the accumulator of the output's tangent."""

    tq: cute.Tensor | None
    tk: cute.Tensor | None
    tv: cute.Tensor | None
    tv_shared: cute.Tensor | None
    pt: cute.Tensor
    tout: cute.Tensor


@dataclass(frozen=True, kw_only=True)
class Running(softmax.Running):
    """Besides, per row: this thread's share of what is `pushed`, the sum of probabilities times what tangents
    of scores are more than the `centre`."""

    pushed: cute.Tensor
    centre: cute.Tensor

    def clear(self) -> None:
        super().clear()
        self.pushed.fill(0.0)
        self.centre.fill(0.0)
