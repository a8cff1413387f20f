"""Sigmoid attention: each pair has a weight of its own, the sigmoid of its score, without a softmax.

    sigmoid(score + bias)

Source: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", arXiv:2409.04431,
section 2 (bias -log n, n being the number of keys).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fa4flex.primitives.normalizer import normalizer_family
from fa4flex.primitives.score import ScoreFunction
from fa4flex.variants._cases import Case, Sizes, show, weighed
from fa4flex.variants._common import finite
from fa4flex.variants.causal import causal


@normalizer_family
def sigmoid_attention(bias: float | None = None) -> ScoreFunction:
    """bias: a number that is added to scores; None: -log(kv_len), kv_len being each sequence's own.

    The weight is in (0, 1) whatever the score is. Raises InputError unless bias is finite.
    """
    if bias is None:
        return _by_length
    bias = finite("sigmoid_attention", "bias", bias)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + bias)

    return mod


def _by_length(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, kv_len: Any) -> Any:
    return torch.sigmoid(score - torch.log(torch.ones_like(score) * kv_len))


def definition(score: float, bias: float) -> float:
    return 1 / (1 + math.exp(-(score + bias)))


def _of(s: Sizes, bias: float | None) -> Any:
    own = -math.log(s.kv_len) if bias is None else bias
    return weighed(s, sigmoid_attention(bias), lambda x, b, h, q, kv: definition(x, own), mask=causal)


CASES = (
    Case(lambda s: _of(s, None), approximate=True),
    Case(lambda s: _of(s, -1.5), approximate=True, compiled=False),
)
PICTURE = None

if __name__ == "__main__":
    show(CASES)
