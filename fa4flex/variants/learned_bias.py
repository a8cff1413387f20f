"""A learned bias added to the scores: by position pair, or by relative distance.

    score + bias[b, h, q, kv]     score + bias[h, q, kv]     score + bias[h, clip(p - kv) + S - 1]

Source: Vaswani et al., arXiv:1706.03762 (additive bias); relative: Shaw et al., arXiv:1803.02155, section 3.2
(clipped distances), as in Swin, arXiv:2103.14030, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import FLOATS, aligned, for_heads, table
from fa4flex.variants.causal import causal


@score_family
def learned_bias(bias: Tensor) -> ScoreFunction:
    """bias: learnable floating tensor, its rank says which one:

    [H, 2 S - 1]      relative: entry p - kv + S - 1, where distances beyond S - 1 share the outermost
                      entries; p is the query's position aligned bottom-right
    [H, Q, KV]        by position, indices absolute
    [B, H, Q, KV]     by position for each batch entry, indices absolute

    B, H, Q and KV may be 1 (shared). Raises InputError.
    """
    bias = table("learned_bias", "bias", bias, FLOATS, (2, 3, 4), "[H, 2 S - 1], [H, Q, KV] or [B, H, Q, KV]")
    if bias.ndim == 2:
        return _for_its_heads(_relative(bias), bias.shape[0])
    shared = [size == 1 for size in bias.shape]

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        indices = (b, h, q_idx, kv_idx)[-len(shared) :]
        return score + bias[tuple(0 if same else i for same, i in zip(shared, indices, strict=True))]

    return _for_its_heads(mod, bias.shape[-3])


def _for_its_heads(mod: ScoreFunction, heads: int) -> ScoreFunction:
    """A table of one head is shared by any number of heads."""
    return mod if heads == 1 else for_heads(mod, heads)


def _relative(bias: Tensor) -> ScoreFunction:
    if bias.shape[1] % 2 == 0:
        raise InputError(
            f"learned_bias(bias=<{list(bias.shape)}>)",
            "[H, 2 S - 1]: an odd number of distances, -(S - 1) to S - 1",
            "pad the table, or pass a [H, Q, KV] bias",
        )
    far = bias.shape[1] // 2
    row_of = (lambda h: h) if bias.shape[0] > 1 else (lambda h: 0)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        behind = aligned(q_idx, q_len, kv_len) - kv_idx
        return score + bias[row_of(h), torch.clamp(behind, -far, far) + far]

    return mod


def definition(score: float, q: int, kv: int, row: list[float]) -> float:
    """Relative; `row` holds one head's bias from the furthest key ahead to the furthest behind."""
    far = len(row) // 2
    distances = list(range(-far, far + 1))
    return score + row[distances.index(sorted((-far, q - kv, far))[1])]


def _by_distance(s: Sizes) -> Drawn:
    bias = s.learned(torch.randn(s.heads, 2 * s.of(33, least=3) - 1))
    return modified(
        s,
        learned_bias,
        lambda x, b, h, q, kv: definition(x, q + s.kv_len - s.q_len, kv, bias[h].tolist()),
        bias,
        mask=causal,
    )


def _by_pair(s: Sizes) -> Drawn:
    bias = s.learned(torch.randn(s.heads, s.q_len, s.kv_len, dtype=torch.bfloat16))
    return modified(s, learned_bias, lambda x, b, h, q, kv: x + float(bias[h, q, kv]), bias, mask=causal)


def _by_key(s: Sizes) -> Drawn:
    bias = s.learned(torch.randn(s.batch, 1, 1, s.kv_len))
    return modified(s, learned_bias, lambda x, b, h, q, kv: x + float(bias[b, 0, 0, kv]), bias)


CASES = (Case(_by_distance), Case(_by_pair), Case(_by_key))
PICTURE = Picture("learned_bias(torch.randn(8, 127).cumsum(1))")

if __name__ == "__main__":
    show(CASES)
