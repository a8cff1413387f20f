"""Heads: grouped-query attention (arXiv:2305.13245), where `ratio` query heads share a KV head.

Query head h reads KV head h // ratio. Mods always see query heads. k and v may differ in heads, as in
differential attention (arXiv:2410.05258), two of whose maps share a head of v: each has its own ratio.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fa4flex.errors import InputError


class Shares(NamedTuple):
    """KV heads that share a head of k, and that share a head of v.

    KV heads are equal shares of the query heads, all of one reading the same heads of k and of v, and as few
    as that allows: as many as the least common multiple of the heads of k and of v. KV head j reads head
    j // k of k and head j // v of v.
    """

    k: int = 1
    v: int = 1

    @staticmethod
    def of(k_heads: int, v_heads: int) -> Shares:
        """Those of so many heads."""
        if k_heads == v_heads or not (k_heads and v_heads):
            return ALIKE
        common = math.gcd(k_heads, v_heads)
        return Shares(v_heads // common, k_heads // common)


ALIKE = Shares()
"""k and v have as many heads."""


def refuse_apart(k_heads: int, v_heads: int, door: str) -> None:
    """Raise InputError where k and v differ in heads, which `door` of torch's does not have."""
    if k_heads != v_heads:
        raise InputError(
            f"{k_heads} heads of keys and {v_heads} heads of values in {door}",
            "one number of heads for both, as torch has it",
            "call fa4flex.compile(...) or fa4flex.attention, which take all that divide the query heads",
        )


def ratio(q_heads: int, kv_heads: int, enable_gqa: bool = True, of: str = "KV heads") -> int:
    """Query heads per KV head. `enable_gqa=False` requires 1, as torch's flex_attention does. of: what the
    latter are, in words.

    Raises InputError where query heads are no multiple of KV heads.
    """
    if q_heads < 1 or kv_heads < 1:
        raise InputError(
            f"{q_heads} query heads, {kv_heads} {of}", "at least one of each", "check the shapes"
        )
    if q_heads % kv_heads:
        raise InputError(
            f"{q_heads} query heads with {kv_heads} {of}",
            f"query heads a multiple of {of}",
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
