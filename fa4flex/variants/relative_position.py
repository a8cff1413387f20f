"""Relative position: the signed distance itself as a bias.

    score + slope * (p - kv),   p = q + (kv_len - q_len)

Source: the relative position example of the FlexAttention tutorial (slope 1).
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._alone import show_score
from fa4flex.variants._check import finite
from fa4flex.variants._positions import aligned


@score_family
def relative_position(slope: float = 1.0) -> ScoreFunction:
    """A positive slope favours keys far behind the query; aligned bottom-right. Raises InputError."""
    slope = finite("relative_position", "slope", slope)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return score + slope * (aligned(q_idx, q_len, kv_len) - kv_idx)

    return mod


def definition(score: float, q: int, kv: int, slope: float, q_len: int, kv_len: int) -> float:
    return score + slope * (q + kv_len - q_len - kv)


def main() -> None:
    show_score(relative_position(0.5), lambda score, h, q, kv: definition(score, q, kv, 0.5, 4, 6), 1, 4, 6)


if __name__ == "__main__":
    main()
