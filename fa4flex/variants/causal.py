"""Causal attention: each query attends itself and every key before it.

    allowed(q, kv) = kv <= q + (kv_len - q_len)

Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3.2.3.
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, masked, show
from fa4flex.variants._common import aligned


@mask_family
def causal() -> MaskMod:
    """kv <= q, aligned bottom-right: the last query attends all keys (FlashAttention's convention).

    A FlexAttention function `q_idx >= kv_idx` means top-left alignment; the two agree where q_len == kv_len.
    """

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return kv_idx <= aligned(q_idx, q_len, kv_len)

    return mod


def definition(q: int, kv: int, q_len: int, kv_len: int) -> bool:
    keys_before_the_queries = kv_len - q_len
    return kv <= keys_before_the_queries + q


def _inverted(q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return not definition(q, kv, q_len, kv_len)


CASES = (
    Case(lambda s: masked(s, causal, definition, s.q_len, s.kv_len)),
    Case(lambda s: masked(s, ~causal, _inverted, s.q_len, s.kv_len)),
)
PICTURE = Picture("causal")


if __name__ == "__main__":
    show(CASES)
