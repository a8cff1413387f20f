"""Chunked local attention: causal inside chunks of fixed size.

    allowed(q, kv) = kv <= p and kv // chunk == p // chunk,   p = q + (kv_len - q_len)

Source: Llama 4 (its layers with rotary positions; `attention_chunk_size` in the published configurations).
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._alone import show_mask
from fa4flex.variants._check import whole
from fa4flex.variants._positions import aligned


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


def main() -> None:
    show_mask(chunked_local(4), lambda q, kv: definition(q, kv, 4, 9, 12), 9, 12)


if __name__ == "__main__":
    main()
