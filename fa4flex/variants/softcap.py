"""Soft capping: scores are squeezed into (-cap, cap).

    cap * tanh(score / cap)

Source: Gemma 2, arXiv:2408.00118, section 2 (attention 50.0, final logits 30.0); Grok-1 (attention 30.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import finite
from fa4flex.variants.alibi import alibi, slope_list
from fa4flex.variants.causal import causal
from fa4flex.variants.sliding_window import sliding_window


@score_family
def softcap(cap: float = 30.0) -> ScoreFunction:
    """Applied to the scaled score. Raises InputError unless cap is finite and above 0."""
    cap = finite("softcap", "cap", cap, positive=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return mod


def definition(score: float, cap: float) -> float:
    up, down = math.exp(score / cap), math.exp(-score / cap)
    return cap * (up - down) / (up + down)


def _over_alibi(s: Sizes) -> Drawn:
    slopes = slope_list(s.heads)

    def definition_of_both(x: float, b: int, h: int, q: int, kv: int) -> float:
        return definition(x + slopes[h] * (kv - (q + s.kv_len - s.q_len)), 20.0)

    return modified(s, lambda: alibi >> softcap(20.0), definition_of_both, mask=sliding_window(s.of(200)))


CASES = (
    Case(
        lambda s: modified(s, lambda: softcap(2.0), lambda x, b, h, q, kv: definition(x, 2.0), mask=causal),
        approximate=True,
    ),
    Case(_over_alibi, approximate=True),
)
PICTURE = Picture("softcap(20.0)", curve=True)

if __name__ == "__main__":
    show(CASES)
