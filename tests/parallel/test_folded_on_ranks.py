"""Folded sequences on ranks simulated by threads: the mask sees places of the whole tree."""

from __future__ import annotations

import torch
from ranks import Threads, on_ranks
from torch import Tensor

import fa4flex
from fa4flex.parallel import ContextParallel, Layout, plan
from fa4flex.trees import fold
from fa4flex.variants import alibi


def test_ranks_compute_what_one_process_does() -> None:
    prompt = [1] * 14
    folded = fold([[*prompt, n, *([2] * n)] for n in range(3, 9)] + [[5] * 9])
    size = len(folded.tokens)
    attn = fa4flex.compile(folded.at_positions(alibi), folded.mask)
    whole = [torch.randn(1, 2, size, 8, dtype=torch.float64) for _ in range(3)]
    upstream = torch.randn_like(whole[0])

    def run(links: Threads) -> tuple[ContextParallel, list[Tensor]]:
        cp = ContextParallel(attn.variant, links, Layout(tile=4))
        at = cp.placement((size, size), 1, 2)
        own = [at.shard(x, links.rank, 2).clone().requires_grad_() for x in whole]
        out = cp(*own)
        return at, [out, *torch.autograd.grad(out, own, at.shard(upstream, links.rank, 2))]

    found = on_ranks(3, run)
    whole = [x.requires_grad_() for x in whole]
    out = attn(*whole)
    for i, wanted in enumerate([out, *torch.autograd.grad(out, whole, upstream)]):
        torch.testing.assert_close(found[0][0].unshard([x[1][i] for x in found]), wanted)


def test_no_rank_receives_what_none_of_its_queries_sees() -> None:
    """Two prompts with rollouts, as two documents, over two ranks: keys of few tokens travel."""
    folded = fold([[p] * 4096 + [r] * 512 for p in range(2) for r in range(2, 10)])
    planned = plan(fa4flex.compile(mask=folded.mask), len(folded.tokens), ranks=2)
    assert planned.placement.imbalance < 0.03
    assert sum(planned.exchange.received) < len(folded.tokens) // 2
