"""Symmetric window: each query attends the keys at most `window` positions away, on either side.

    allowed(q, kv) = p - window <= kv <= p + window,   p = q + (kv_len - q_len)

Source: Longformer, arXiv:2004.05150, section 3.1 (its window size w is 2 * window here).
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, member, show
from fa4flex.variants._common import aligned, whole


@mask_family
def symmetric_window(window: int = 256) -> MaskMod:
    """2 * window + 1 keys around the query's position, aligned bottom-right.

    FlashAttention's window_size=(window, window). Raises InputError unless window >= 1.
    """
    window = whole("symmetric_window", "window", window)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = aligned(q_idx, q_len, kv_len)
        return (kv_idx >= position - window) & (kv_idx <= position + window)

    return mod


def definition(q: int, kv: int, window: int, q_len: int, kv_len: int) -> bool:
    return abs((kv_len - q_len + q) - kv) <= window


CASES = (Case(lambda s: member(s, symmetric_window, definition, s.of(70))),)
PICTURE = Picture("symmetric_window(20)")


if __name__ == "__main__":
    show(CASES)
