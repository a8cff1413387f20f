"""Soft capping: scores are squeezed into (-cap, cap).

    cap * tanh(score / cap)

Source: Gemma 2, arXiv:2408.00118, section 2 (attention 50.0, final logits 30.0); Grok-1 (attention 30.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._alone import show_score
from fa4flex.variants._check import finite


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


def main() -> None:
    show_score(softcap(2.0), lambda score, h, q, kv: definition(score, 2.0))


if __name__ == "__main__":
    main()
