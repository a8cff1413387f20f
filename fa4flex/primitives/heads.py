"""Heads: grouped-query attention (arXiv:2305.13245), where `ratio` query heads share a KV head.

Query head h reads KV head h // ratio. Mods always see query heads.
"""

from __future__ import annotations

from fa4flex.errors import InputError


def ratio(q_heads: int, kv_heads: int, enable_gqa: bool = True) -> int:
    """Query heads per KV head. `enable_gqa=False` requires 1, as torch's flex_attention does.

    Raises InputError where query heads are no multiple of KV heads.
    """
    if q_heads < 1 or kv_heads < 1:
        raise InputError(
            f"{q_heads} query heads, {kv_heads} KV heads", "at least one of each", "check the shapes"
        )
    if q_heads % kv_heads:
        raise InputError(
            f"{q_heads} query heads with {kv_heads} KV heads",
            "query heads a multiple of KV heads",
            "check the layout: heads are dimension 1 of bhsd and dimension 2 of bshd"
            if q_heads > kv_heads
            else "keys have more heads than queries: check that q and k are not swapped",
        )
    if q_heads != kv_heads and not enable_gqa:
        raise InputError(
            f"{q_heads} query heads with {kv_heads} KV heads and enable_gqa=False",
            "equal numbers of heads",
            "pass enable_gqa=True to share each KV head between query heads",
        )
    return q_heads // kv_heads
