"""Causal sliding window: each query attends itself and the window - 1 keys before it.

    allowed(q, kv) = p - window < kv <= p,   p = q + (kv_len - q_len)

Source: Mistral 7B, arXiv:2310.06825, section 2; Longformer, arXiv:2004.05150, section 3.1.
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, member, show
from fa4flex.variants._common import aligned, whole


@mask_family
def sliding_window(window: int = 1024) -> MaskMod:
    """The last `window` keys up to and with the query's own position, aligned bottom-right.

    `window` counts the query itself: it is FlashAttention's window_size=(window - 1, 0) and Hugging Face's
    `sliding_window`. Raises InputError unless window >= 1.
    """
    window = whole("sliding_window", "window", window)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = aligned(q_idx, q_len, kv_len)
        return (kv_idx <= position) & (kv_idx > position - window)

    return mod


def definition(q: int, kv: int, window: int, q_len: int, kv_len: int) -> bool:
    position = kv_len - q_len + q
    return kv in range(position - window + 1, position + 1)


CASES = (
    Case(lambda s: member(s, sliding_window, definition, 1)),
    Case(lambda s: member(s, sliding_window, definition, s.of(150))),
    Case(lambda s: member(s, sliding_window, definition, 1024), compiled=False),
)
PICTURE = Picture("sliding_window(32)")


if __name__ == "__main__":
    show(CASES)
