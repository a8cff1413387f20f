"""SiLU attention (HSTU): the weight of a pair is the SiLU of its score, divided by the number of keys.

    score * sigmoid(score) / n

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", arXiv:2402.17152, section 3 (pointwise aggregated attention).
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
def silu_attention(n: float | None = None) -> ScoreFunction:
    """n: the number that weights are divided by; None: kv_len, each sequence's own.

    A weight is at least -0.279 / n, and at most score / n. Raises InputError unless n is finite and above 0.
    """
    if n is None:
        return _by_length
    n = finite("silu_attention", "n", n, positive=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * torch.sigmoid(score) / n

    return mod


def _by_length(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, kv_len: Any) -> Any:
    return score * torch.sigmoid(score) / kv_len


def definition(score: float, n: float) -> float:
    return score / (1 + math.exp(-score)) / n


def _of(s: Sizes, n: float | None) -> Any:
    own = float(s.kv_len) if n is None else n
    return weighed(s, silu_attention(n), lambda x, b, h, q, kv: definition(x, own), mask=causal)


CASES = (
    Case(lambda s: _of(s, None), approximate=True),
    Case(lambda s: _of(s, 7.0), approximate=True, compiled=False),
)
PICTURE = None

if __name__ == "__main__":
    show(CASES)
