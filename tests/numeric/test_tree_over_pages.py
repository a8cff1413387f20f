"""Drafted tokens over a paged cache: a tree for each sequence behind its prefix, against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.variants import softcap, tree
from fa4flex.variants.tree import ancestors_of, definition

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def by_definition(q: Tensor, k: Tensor, v: Tensor, parents: list[int], cap: float | None) -> Tensor:
    """One sequence: q [Hq, N, D], k and v [Hkv, T, D], of which the last N are the tree's."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    prefix = k.shape[1] - len(parents)
    allowed = torch.tensor(
        [[definition(i, j, parents, prefix) for j in range(k.shape[1])] for i in range(len(parents))]
    )
    scores = q @ k.mT * WIDTH**-0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [2, 16, 64])
@pytest.mark.parametrize("own_trees", [False, True])
def test_trees_stand_behind_each_prefix(nodes: int, page_size: int, own_trees: bool) -> None:
    batch, cap = 3, 0.7 if own_trees else None
    prefixes = [0, 37, 5]
    parents = [[int(torch.randint(-1, i, ())) if i else -1 for i in range(nodes)] for _ in range(batch)]
    if not own_trees:
        parents = parents[:1] * batch
    lengths = torch.tensor(prefixes) + nodes
    most = -(-int(lengths.max()) // page_size)
    table = torch.randperm(batch * most).view(batch, most)
    pools = [torch.full((batch * most, page_size, KV_HEADS, WIDTH), torch.nan).double() for _ in range(2)]
    kv = [[torch.randn(int(n), KV_HEADS, WIDTH).double() for n in lengths] for _ in pools]
    for pool, each in zip(pools, kv, strict=True):
        for row, tokens in zip(table, each, strict=True):
            t = torch.arange(len(tokens))
            pool[row[t // page_size], t % page_size] = tokens
    q = torch.randn(batch, HEADS, nodes, WIDTH, dtype=torch.float64)
    above = torch.stack([ancestors_of(x) for x in parents])
    attn = fa4flex.compile(
        score_mod=None if cap is None else softcap(cap),
        mask=tree(ancestors=above) if own_trees else tree(parents[0]),
    )
    out = attn(q, *pools, paging=fa4flex.Paging(table, lengths))
    want = [
        by_definition(rows, *(x[n].transpose(0, 1) for x in kv), parents[n], cap) for n, rows in enumerate(q)
    ]
    torch.testing.assert_close(out, torch.stack(want))
