"""Sandwich: the inner product of two sinusoidal position embeddings as a bias that decays with distance.

    score + H / (8 (h + 1)) * sum_{i < d_bar/2} cos((p - kv) / 10000^(2 i / d_bar))
    with p = q + (kv_len - q_len)

Source: Chi et al., Dissecting Transformer Length Extrapolation, arXiv:2212.10356, section 5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fa4flex.errors import InputError
from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import aligned, whole
from fa4flex.variants.causal import causal


@score_family
def sandwich(max_len: int = 8192, d_bar: int = 128, device: torch.device | str = "cpu") -> ScoreFunction:
    """max_len: the longest key sequence; the cosines are a float32 table of that length, on `device`.

    d_bar: the embeddings' width, even. H is the number of query heads. Aligned bottom-right. A distance
    beyond the table is an index error, never another distance's value. Raises InputError.
    """
    max_len, d_bar = whole("sandwich", "max_len", max_len), whole("sandwich", "d_bar", d_bar, least=2)
    if d_bar % 2:
        raise InputError(
            f"sandwich(d_bar={d_bar})", "an even width (sine and cosine pairs)", f"use {d_bar + 1}"
        )
    frequency = 10000.0 ** (-2 * torch.arange(d_bar // 2, dtype=torch.float64) / d_bar)
    by_distance = torch.zeros(max_len, dtype=torch.float64)
    for w in frequency:  # one frequency at a time: all at once would take d_bar / 2 tables
        by_distance += torch.cos(torch.arange(max_len) * w)
    by_distance = by_distance.to(device, torch.float32)

    def mod(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any, num_heads: Any
    ) -> Any:
        distance = torch.abs(aligned(q_idx, q_len, kv_len) - kv_idx)
        return score + by_distance[distance] * (num_heads / (8.0 * (h + 1)))

    return mod


def definition(score: float, h: int, q: int, kv: int, heads: int, d_bar: int) -> float:
    embed = [
        [f(p / 10000 ** (2 * i / d_bar)) for i in range(d_bar // 2) for f in (math.sin, math.cos)]
        for p in (q, kv)
    ]
    return score + sum(x * y for x, y in zip(*embed, strict=True)) / (8 * (h + 1) / heads)


def _of(s: Sizes, spare: int, d_bar: int, **rest: Any) -> Drawn:
    longest, device = max(s.q_len, s.kv_len) + spare, torch.get_default_device()
    return modified(
        s,
        lambda: sandwich(longest, d_bar, device),
        lambda x, b, h, q, kv: definition(x, h, q + s.kv_len - s.q_len, kv, s.heads, d_bar),
        **rest,
    )


CASES = (
    Case(lambda s: _of(s, s.of(324), 64, mask=causal), approximate=True),
    Case(lambda s: _of(s, 0, 16), compiled=False),
)
PICTURE = Picture("sandwich(64)")

if __name__ == "__main__":
    show(CASES)
