"""Checkerboard: squares of `block` by `block` pairs, every other one allowed.

    allowed(q, kv) = (q // block + kv // block) is even

Source: the checkerboard example of the FlexAttention tutorial, as a mask; the strided pattern of Child et
al., Sparse Transformers, arXiv:1904.10509, section 4, is its relative.
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, member, show
from fa4flex.variants._common import whole


@mask_family
def checkerboard(block: int = 1) -> MaskMod:
    """Indices are absolute: the square at query 0, key 0 is allowed. Raises InputError unless block >= 1."""
    block = whole("checkerboard", "block", block)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // block + kv_idx // block) % 2 == 0

    return mod


def definition(q: int, kv: int, block: int) -> bool:
    row_starts_allowed = (q // block) % 2 == 0
    column_is_even = (kv // block) % 2 == 0
    return row_starts_allowed == column_is_even


CASES = (
    Case(lambda s: member(s, checkerboard, definition, 1)),
    Case(lambda s: member(s, checkerboard, definition, s.of(50))),
)
PICTURE = Picture("checkerboard(8)")


if __name__ == "__main__":
    show(CASES)
