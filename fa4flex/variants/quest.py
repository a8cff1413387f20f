"""Quest: pages of keys by an upper bound of the query's products with them.

    s(q, J) = sum over channels d of max(q[d] * min(k[d] of page J), q[d] * max(k[d] of page J))

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv:2406.10774,
section 3.3 (algorithm 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.lists import Lists
from fa4flex.primitives.mask import Mask
from fa4flex.select import pool, score, topk
from fa4flex.select.pooling import check_tokens
from fa4flex.variants._cases import Case, selected, show
from fa4flex.variants._common import whole
from fa4flex.variants.causal import causal


def quest(q: Tensor, k: Tensor, page: int = 16, top: int = 128) -> Lists:
    """Lists for q [B, Hq, Sq, D], a few last queries, and k [B, Hk, Skv, D]: blocks=quest(q, k), mask=causal.

    The bound is two products: max(q, 0) with the largest channels of a page, min(q, 0) with the smallest.
    Each query head chooses for itself; pages in the future are left out, aligned bottom-right. Raises
    InputError.
    """
    page, top = whole("quest", "page", page), whole("quest", "top", top)
    check_tokens("quest: q", q)
    with torch.no_grad():
        signs = torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)
        return topk(score(signs, pool(k, page, "max").beside(pool(k, page, "min"))).causal(), top)


def definition(q: list[list[float]], k: list[list[float]], page: int, top: int) -> list[set[int]]:
    """Pages of each query."""
    chosen = []
    for row, query in enumerate(q):
        position, bounds = row + len(k) - len(q), {}
        for first in range(0, position + 1, page):
            channels = list(zip(*k[first : first + page], strict=True))
            bounds[first // page] = sum(
                max(x * min(c), x * max(c)) for x, c in zip(query, channels, strict=True)
            )
        chosen.append(set(sorted(bounds, key=lambda at: -bounds[at])[:top]))
    return chosen


def _mask(*chosen: Any) -> Mask:
    return quest(*chosen).mask(causal)


CASES = (Case(lambda s: selected(s, _mask, definition, 2)),)
PICTURE = None


if __name__ == "__main__":
    show(CASES)
