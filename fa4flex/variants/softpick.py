"""Softpick: a rectified softmax, whose weights are exactly 0 for scores of 0 or less, and need not sum to 1.

    max(exp(score) - 1, 0) / (sum |exp(score) - 1| + eps)

Source: Zuhri et al., "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax",
arXiv:2504.20966, section 3.
"""

from __future__ import annotations

import math
from typing import Any

from fa4flex.primitives.normalizer import Normalizer, normalizer_family
from fa4flex.variants._cases import Case, Sizes, show, weighed
from fa4flex.variants._common import finite
from fa4flex.variants.causal import causal


@normalizer_family
def softpick(eps: float = 1e-6) -> Normalizer:
    """eps: a number above 0 that joins the sum, which is 0 where all scores are.

    Exponentials are relative to the largest score of a row, or to 0, so that none is above 1; exp(score) - 1
    is computed by expm1 where the difference would have no digits. Raises InputError.
    """
    return Normalizer.softpick(finite("softpick", "eps", eps, positive=True))


def definition(scores: list[float], eps: float) -> list[float]:
    """Weights of a row of scores."""
    total = sum(abs(math.expm1(x)) for x in scores) + eps
    return [max(math.expm1(x), 0.0) / total for x in scores]


def _of(s: Sizes, eps: float, **rest: Any) -> Any:
    return weighed(s, softpick(eps), lambda row: definition(row, eps), **rest)


CASES = (
    Case(lambda s: _of(s, 1e-6, mask=causal), compiled=False, kernels=False),
    Case(lambda s: _of(s, 0.5), compiled=False, kernels=False),
)
PICTURE = None

if __name__ == "__main__":
    show(CASES)
