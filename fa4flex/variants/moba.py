"""Mixture of block attention: each query chooses blocks of keys by their means.

    s(q, J) = q . mean(k of block J), of blocks that end at p or before;
    allowed(q, kv) = kv <= p and kv // block is p // block or one of the top - 1 best,
    p = q + (kv_len - q_len)

Source: Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, arXiv:2502.13189, section 2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.lists import Lists
from fa4flex.primitives.mask import Mask
from fa4flex.select import pool, score, topk
from fa4flex.variants._cases import Case, selected, show
from fa4flex.variants._common import whole
from fa4flex.variants.causal import causal


def moba(q: Tensor, k: Tensor, block: int = 512, top: int = 3) -> Lists:
    """Lists for q [B, Hq, Sq, D] and k [B, Hk, Skv, D] of causal attention: blocks=moba(q, k), mask=causal.

    top  blocks of a query, its own among them. Each query head chooses for itself. Aligned bottom-right.

    Raises InputError.
    """
    block, top = whole("moba", "block", block), whole("moba", "top", top)
    with torch.no_grad():
        return topk(score(q, pool(k, block)).causal(whole=True), top, own=1)


def definition(q: list[list[float]], k: list[list[float]], block: int, top: int) -> list[set[int]]:
    """Blocks of each query."""
    chosen = []
    for row, query in enumerate(q):
        own, scores = (row + len(k) - len(q)) // block, {}
        for at in range(own):
            keys = k[at * block : (at + 1) * block]
            scores[at] = sum(x * sum(key[i] for key in keys) / block for i, x in enumerate(query))
        chosen.append({own, *sorted(scores, key=lambda at: -scores[at])[: top - 1]})
    return chosen


def _mask(*chosen: Any) -> Mask:
    return moba(*chosen).mask(causal)


CASES = (Case(lambda s: selected(s, _mask, definition, 3)),)
PICTURE = None


if __name__ == "__main__":
    show(CASES)
