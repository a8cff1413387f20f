"""Dilated window: every `dilation`-th key at most `window` positions away.

    allowed(q, kv) = |p - kv| <= window and (p - kv) divisible by dilation,   p = q + (kv_len - q_len)

Source: Longformer, arXiv:2004.05150, section 3.1 (figure 2c).
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, member, show
from fa4flex.variants._common import aligned, whole


@mask_family
def dilated_window(window: int = 256, dilation: int = 2) -> MaskMod:
    """Both sides, distances in positions (not in steps), aligned bottom-right.

    Combine with `causal` for decoders. Raises InputError unless window >= 1 and dilation >= 1.
    """
    window = whole("dilated_window", "window", window)
    dilation = whole("dilated_window", "dilation", dilation)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = aligned(q_idx, q_len, kv_len)
        near = (kv_idx >= position - window) & (kv_idx <= position + window)
        return near & ((position - kv_idx) % dilation == 0)

    return mod


def definition(q: int, kv: int, window: int, dilation: int, q_len: int, kv_len: int) -> bool:
    distance = abs((kv_len - q_len + q) - kv)
    return distance <= window and distance in range(0, window + 1, dilation)


CASES = (Case(lambda s: member(s, dilated_window, definition, s.of(48, least=s.some(3)), s.some(3))),)
PICTURE = Picture("dilated_window(window=32, dilation=4)")


if __name__ == "__main__":
    show(CASES)
