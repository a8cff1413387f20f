"""Softmax plus n ("off by one"): the softmax beside n more keys, of score 0 and value 0.

    exp(score) / (sum exp(score) + n)

Source: Miller, "Attention Is Off By One", evanmiller.org/attention-is-off-by-one.html, 2023 (n = 1).
"""

from __future__ import annotations

import math
from typing import Any

from fa4flex.primitives.normalizer import Normalizer, normalizer_family
from fa4flex.variants._cases import Case, Sizes, show, weighed
from fa4flex.variants._common import finite
from fa4flex.variants.causal import causal


@normalizer_family
def softmax_plus(n: float = 1.0) -> Normalizer:
    """n: the number that joins the sum. The LSE includes it: log(sum exp(score) + n).

    Scores are shifted by the largest of them and log n, as with a sink. Raises InputError unless n is finite
    and above 0.
    """
    return Normalizer.softmax(plus=finite("softmax_plus", "n", n, positive=True))


def definition(scores: list[float], n: float) -> list[float]:
    """Weights of a row of scores."""
    total = sum(map(math.exp, scores)) + n
    return [math.exp(x) / total for x in scores]


def _of(s: Sizes, n: float, **rest: Any) -> Any:
    return weighed(s, softmax_plus(n), lambda row: definition(row, n), **rest)


CASES = (Case(lambda s: _of(s, 1.0, mask=causal)), Case(lambda s: _of(s, 2.5), compiled=False))
PICTURE = None

if __name__ == "__main__":
    show(CASES)
