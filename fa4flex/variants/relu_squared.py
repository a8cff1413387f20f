"""Squared ReLU attention: the weight of a pair is the square of its score, 0 where that is negative.

    max(score, 0)^2 / n

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, section 3.1 (relu squared, divided
by the number of keys).
"""

from __future__ import annotations

from typing import Any

import torch

from fa4flex.primitives.normalizer import normalizer_family
from fa4flex.primitives.score import ScoreFunction
from fa4flex.variants._cases import Case, Sizes, show, weighed
from fa4flex.variants._common import finite
from fa4flex.variants.causal import causal

LARGEST = 2.0**40
"""Scores above it count as it does: sums of the squares of more stay finite in float32 for 10^14 keys."""


@normalizer_family
def relu_squared(n: float | None = None) -> ScoreFunction:
    """n: the number that weights are divided by; None: kv_len, each sequence's own.

    Scores above 2^40 count as 2^40, whose square is far from the end of float32, and receive no gradient.
    Raises InputError unless n is finite and above 0.
    """
    if n is None:
        return _by_length
    n = finite("relu_squared", "n", n, positive=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.clamp(score, 0.0, LARGEST) ** 2 / n

    return mod


def _by_length(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, kv_len: Any) -> Any:
    return torch.clamp(score, 0.0, LARGEST) ** 2 / kv_len


def definition(score: float, n: float) -> float:
    return max(score, 0.0) ** 2 / n


def _of(s: Sizes, n: float | None) -> Any:
    own = float(s.kv_len) if n is None else n
    return weighed(s, relu_squared(n), lambda x, b, h, q, kv: definition(x, own), mask=causal)


CASES = (Case(lambda s: _of(s, None)), Case(lambda s: _of(s, 7.0), compiled=False))
PICTURE = None

if __name__ == "__main__":
    show(CASES)
