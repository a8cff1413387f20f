"""Keys in pages on a GPU: right, without waiting for the host, in graphs that read tables and lengths anew;
wrong tables are told by the next call."""

from __future__ import annotations

import random
from typing import Any

import on_gpus
import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, Paging
from fa4flex.variants import alibi, causal, sliding_window, tree
from fa4flex.variants.tree import ancestors_of

pytestmark = on_gpus.ANY

LONGEST = 3000


class Pool:
    """Pages of a few sequences, all of whose keys are finite; 4 query heads share each of 2 KV heads."""

    def __init__(self, page_size: int, d: int = 128, batch: int = 5, q_len: int = 2) -> None:
        columns = -(-LONGEST // page_size)
        self.k, self.v = (self.drawn(batch * columns + 7, page_size, 2, d) for _ in range(2))
        self.q = self.drawn(batch, 8, q_len, d)
        self.table = torch.zeros(batch, columns, dtype=torch.int32, device="cuda")
        self.used = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.paging = Paging(self.table, self.used)
        self.change()

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def change(self) -> None:
        """Other pages and lengths in the same tensors; entries that nobody uses are no pages."""
        batch, columns = self.table.shape
        pages = torch.randperm(self.k.shape[0])[: batch * columns].view(batch, columns)
        used = torch.randint(0, LONGEST + 1, (batch,))
        live = torch.arange(columns) * self.k.shape[1] < used.unsqueeze(1)
        self.table.copy_(torch.where(live, pages, 10**9))
        self.used.copy_(used)

    def check(self, attn: Any, out: Tensor) -> None:
        paging = Paging(self.table.cpu(), self.used.cpu())
        exact = attn(*(x.cpu().double() for x in (self.q, self.k, self.v)), paging=paging)
        assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()

    def __call__(self, attn: Any) -> Tensor:
        with torch.no_grad():
            return attn(self.q, self.k, self.v, paging=self.paging)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48, 64, 128, 256])
def test_changes_wait_for_nothing(page_size: int, d: int) -> None:
    changes_wait_for_nothing(fa4flex.compile(mask=causal, score_mod=alibi), Pool(page_size, d))


@pytest.mark.parametrize("page_size", [1, 16])
def test_trees(page_size: int) -> None:
    """Masks that are no key intervals; of 16 drafted tokens, with 4 heads that share keys, 64 rows."""
    above = torch.stack([ancestors_of([random.randrange(-1, n) if n else -1 for n in range(16)])] * 5)
    on_gpu, on_cpu = (fa4flex.compile(mask=tree(ancestors=x)) for x in (above.cuda(), above))
    changes_wait_for_nothing(on_gpu, Pool(page_size, q_len=16), on_cpu)


def changes_wait_for_nothing(attn: Any, pool: Pool, exact: Any = None) -> None:
    """exact: the same attention on a CPU."""
    exact = exact or attn
    pool.check(exact, pool(attn))
    pool.change()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = pool(attn)
        again = attn(pool.q, pool.k, pool.v, paging=Paging(pool.table, pool.used))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pool.check(exact, out)
    assert torch.equal(out, again)
    fa4flex.synchronize()


def test_a_graph_reads_tables_and_lengths_anew() -> None:
    attn, pool = fa4flex.compile(mask=causal & sliding_window(700)), Pool(16)
    graph, out = on_gpus.captured(lambda: pool(attn))
    for _ in range(50):
        pool.change()
        graph.replay()
        pool.check(attn, out)


@pytest.mark.parametrize("page", [-1, 10**9])
def test_wrong_pages_are_told_by_the_next_call(page: int) -> None:
    attn, pool = fa4flex.compile(mask=causal), Pool(16)
    pool(attn)
    pool.used[0] = LONGEST
    pool.table[0] = 0
    pool.table[0, 3] = page
    pool(attn)
    with pytest.raises(InputError, match=f"page {page} in the page table"):
        fa4flex.synchronize()
