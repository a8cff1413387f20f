"""ALiBi: a penalty that grows linearly with distance, at a slope of its own for each head.

    score + slope[h] * (kv - p),   p = q + (kv_len - q_len)

For H a power of two, slope[h] = 2^(-8 (h + 1) / H). Otherwise, with n the largest power of two below H, the
first n slopes are those of n heads, and the rest every other slope of 2n heads: 2^(-4 (2 (h - n) + 1) / n).

Source: Press et al., Train Short, Test Long, arXiv:2108.12409, section 3 and its published code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import FLOATS, aligned, for_heads, table
from fa4flex.variants.causal import causal
from fa4flex.variants.sliding_window import sliding_window


@score_family
def alibi(slopes: Tensor | None = None, symmetric: bool = False) -> ScoreFunction:
    """slopes: floating [H] or [B, H], learnable; None means the paper's, from the number of query heads.

    A call with another number of query heads than H raises InputError.

    The paper's bias is signed (for causal masks, where kv <= p). symmetric=True takes -|p - kv| instead, as
    FlashAttention does for bidirectional attention. Aligned bottom-right. Raises InputError.
    """
    away = (lambda distance: -torch.abs(distance)) if symmetric else (lambda distance: distance)
    if slopes is None:

        def mod(
            score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any, num_heads: Any
        ) -> Any:
            distance = kv_idx - aligned(q_idx, q_len, kv_len)
            return score + default_slope(h, num_heads) * away(distance)

        return mod
    slope_table = table("alibi", "slopes", slopes, FLOATS, (1, 2), "[H] or [B, H]")
    slope_of = (lambda b, h: slope_table[h]) if slope_table.ndim == 1 else (lambda b, h: slope_table[b, h])

    def mod_given(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return score + slope_of(b, h) * away(kv_idx - aligned(q_idx, q_len, kv_len))

    return for_heads(mod_given, slope_table.shape[-1])


def default_slope(h: Any, num_heads: Any) -> Any:
    """The paper's slope of head h: arithmetic on h and num_heads, for any number of heads up to 2^16."""
    # The halves keep rounding away from whole numbers: log2 and exp2 need not be exact on every device.
    n = torch.exp2(torch.floor(torch.log2(torch.as_tensor(num_heads + 0.5))))
    return torch.exp2(-8.0 / n * torch.where(h < n - 0.5, h + 1.0, h - n + 0.5))


def slope_list(heads: int) -> list[float]:
    """The slopes literally, as the paper lists them: a geometric sequence, and every other of the next."""
    n = 1
    while 2 * n <= heads:
        n *= 2
    first = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    finer = [2 ** (-8 * i / (2 * n)) for i in range(1, 2 * n + 1)]
    return first + finer[0::2][: heads - n]


def definition(score: float, ahead: int, slope: float) -> float:
    """`ahead`: how far the key is ahead of the query's position."""
    return score + slope * ahead


def _published(s: Sizes) -> Drawn:
    slopes = slope_list(s.heads)
    return modified(
        s, alibi, lambda x, b, h, q, kv: definition(x, kv - (q + s.kv_len - s.q_len), slopes[h]), mask=causal
    )


def _by_head(s: Sizes) -> Drawn:
    slopes = s.learned(torch.rand(s.heads) * 0.2)
    return modified(
        s,
        alibi,
        lambda x, b, h, q, kv: definition(x, kv - (q + s.kv_len - s.q_len), float(slopes[h])),
        slopes,
        mask=sliding_window(s.of(100)),
    )


def _symmetric(s: Sizes) -> Drawn:
    slopes = s.learned(torch.rand(s.batch, s.heads) * 0.1)
    return modified(
        s,
        lambda slopes: alibi(slopes, symmetric=True),
        lambda x, b, h, q, kv: definition(x, -abs(kv - (q + s.kv_len - s.q_len)), float(slopes[b, h])),
        slopes,
    )


CASES = (Case(_published), Case(_by_head), Case(_symmetric))
PICTURE = Picture("alibi")

if __name__ == "__main__":
    show(CASES)
