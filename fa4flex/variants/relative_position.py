"""Relative position: the signed distance itself as a bias.

    score + slope * (p - kv),   p = q + (kv_len - q_len)

Source: the relative position example of the FlexAttention tutorial (slope 1).
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import aligned, finite


@score_family
def relative_position(slope: float = 1.0) -> ScoreFunction:
    """A positive slope favours keys far behind the query; aligned bottom-right. Raises InputError."""
    slope = finite("relative_position", "slope", slope)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return score + slope * (aligned(q_idx, q_len, kv_len) - kv_idx)

    return mod


def definition(score: float, q: int, kv: int, slope: float, q_len: int, kv_len: int) -> float:
    return score + slope * (q + kv_len - q_len - kv)


def _of(s: Sizes, slope: float) -> Drawn:
    return modified(
        s,
        lambda: relative_position(slope),
        lambda x, b, h, q, kv: definition(x, q, kv, slope, s.q_len, s.kv_len),
    )


CASES = (Case(lambda s: _of(s, -0.02)), Case(lambda s: _of(s, 1.0), compiled=False))
PICTURE = Picture("relative_position(0.05)")

if __name__ == "__main__":
    show(CASES)
