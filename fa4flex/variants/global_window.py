"""Global tokens with a symmetric window: global tokens attend, and are attended by, everyone.

    allowed(q, kv) = global(p) or global(kv) or |p - kv| <= window,   p = q + (kv_len - q_len)

Source: Longformer, arXiv:2004.05150, section 3.1 (figure 2d).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, show
from fa4flex.variants._common import BOOL, aligned, table, whole


@mask_family
def global_window(window: int = 256, tokens: int | Tensor = 1) -> MaskMod:
    """`tokens`: how many leading tokens are global, or a bool tensor [kv_len] that marks them.

    `window` keys on either side, aligned bottom-right; combine with `causal` for decoders. Raises InputError.
    """
    window = whole("global_window", "window", window)
    if isinstance(tokens, Tensor):
        marked = table("global_window", "tokens", tokens, BOOL, (1,), "[kv_len]")

        def mod_marked(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
            position = aligned(q_idx, q_len, kv_len)
            near = (kv_idx >= position - window) & (kv_idx <= position + window)
            # Queries before the first key (q_len > kv_len) are no token of `marked`; -1 would read its last.
            is_global = (position >= 0) & marked[torch.clamp(position, min=0)]
            return near | marked[kv_idx] | is_global

        return mod_marked
    leading = whole("global_window", "tokens", tokens, least=0)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = aligned(q_idx, q_len, kv_len)
        near = (kv_idx >= position - window) & (kv_idx <= position + window)
        return near | (kv_idx < leading) | ((position >= 0) & (position < leading))

    return mod


def definition(q: int, kv: int, window: int, marked: set[int], q_len: int, kv_len: int) -> bool:
    position = kv_len - q_len + q
    return position in marked or kv in marked or abs(position - kv) <= window


def _leading(s: Sizes) -> Drawn:
    window, leading = s.of(40), s.of(10, least=0)
    mask = global_window(window, leading)
    return masked(s, mask, definition, window, set(range(leading)), s.q_len, s.kv_len)


def _marked(s: Sizes) -> Drawn:
    window, chosen = s.of(40), {i for i in range(s.kv_len) if torch.rand((), device="cpu") < 14 / s.kv_len}
    mask = global_window(window, torch.tensor([i in chosen for i in range(s.kv_len)]))
    return masked(s, mask, definition, window, chosen, s.q_len, s.kv_len)


CASES = (Case(_leading), Case(_marked))
PICTURE = Picture("global_window(window=16, tokens=8)")


if __name__ == "__main__":
    show(CASES)
