"""Chunked local attention: causal inside chunks of fixed size.

    allowed(q, kv) = kv <= p and kv // chunk == p // chunk,   p = q + (kv_len - q_len)

Source: Llama 4 (its layers with rotary positions; `attention_chunk_size` in the published configurations).
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, member, show
from fa4flex.variants._common import aligned, whole


@mask_family
def chunked_local(chunk: int = 8192) -> MaskMod:
    """Chunks of `chunk` keys from key 0, aligned bottom-right. Raises InputError unless chunk >= 1."""
    chunk = whole("chunked_local", "chunk", chunk)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = aligned(q_idx, q_len, kv_len)
        return (kv_idx <= position) & (kv_idx // chunk == position // chunk)

    return mod


def definition(q: int, kv: int, chunk: int, q_len: int, kv_len: int) -> bool:
    position = kv_len - q_len + q
    start_of_chunk = max(start for start in range(-chunk * q_len, position + 1) if start % chunk == 0)
    return start_of_chunk <= kv <= position


CASES = (Case(lambda s: member(s, chunked_local, definition, s.of(100))),)
PICTURE = Picture("chunked_local(32)")


if __name__ == "__main__":
    show(CASES)
