"""The operators `fa4flex::pool` and `fa4flex::scores`: rows for blocks of tokens, and scaled products, by a
kernel each, or by operations of torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa4flex.primitives import pooled
from fa4flex.runtime.cuda import pooled_scores as kernels
from fa4flex.runtime.flex.choice import by_kernels


def pool(x: Tensor, block: int, how: Any) -> Tensor:
    """Rows [B, H, ceil(S / block), D] of tokens x [B, H, S, D]: "mean", "sum", "max" or "min" of blocks."""
    made = kernels.pool(x, block, how) if by_kernels(x) and kernels.pools(x, block) else None
    return pooled.pooled(x, block, how).contiguous() if made is None else made


def pool_fake(x: Tensor, block: int, how: Any) -> Tensor:
    """Shape and dtype of what `pool` returns."""
    return x.new_empty((*x.shape[:2], -(-x.shape[2] // block), x.shape[3]))


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q.k, float32 or float64 [B, Hq, R, C], of q [B, Hq, R, D] and k [B, Hk, C, D]."""
    made = kernels.scores(q, k, scale) if by_kernels(q) and kernels.multiplies(q, k) else None
    return pooled.products(q, k, scale).contiguous() if made is None else made


def scores_fake(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Shape and dtype of what `scores` returns."""
    return q.new_empty((*q.shape[:3], k.shape[2]), dtype=pooled.wide(q, k))
