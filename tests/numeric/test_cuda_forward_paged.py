"""Pages under many queries, and appending to them, on a GPU: right, without waiting for the host, in graphs
that read tables and lengths anew; wrong contents are told by the next call."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import on_gpus
import pytest
import torch
from append_cases import HOWS, How, Tokens, drawn
from torch import Tensor

import fa4flex
from fa4flex import InputError, KVScales, Paging, QKNorm, Rotary, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap

pytestmark = on_gpus.HOPPER

LONGEST = 700


class Chunks:
    """Chunks of queries of a few sequences over pages of a pool; 4 query heads share each of 2 KV heads.
    Keys of no sequence are NaN."""

    def __init__(
        self, page_size: int, d: int = 128, dv: int = 128, batch: int = 4, tokens: int = 600
    ) -> None:
        columns = -(-LONGEST // page_size)
        pages = batch * columns + 5
        self.k, self.v = (self.of(pages, page_size, 2, width) for width in (d, dv))
        self.q = self.of(tokens, 8, d).normal_()
        self.table = torch.zeros(batch, columns, dtype=torch.int32, device="cuda")
        self.used, self.part = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(2))
        self.cu = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
        self.change()

    def of(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def change(self) -> None:
        """Other keys, pages and lengths in the same tensors; entries that nobody uses are no pages."""
        (batch, columns), size, tokens = self.table.shape, self.k.shape[1], self.q.shape[0]
        pages = torch.randperm(self.k.shape[0])[: batch * columns].view(batch, columns)
        used = torch.randint(0, LONGEST + 1, (batch,))
        live = torch.arange(columns) * size < used.unsqueeze(1)
        self.table.copy_(torch.where(live, pages, 10**9))
        self.used.copy_(used)
        cuts = torch.cat((torch.tensor([0]), torch.randint(0, tokens + 1, (batch - 1,)).sort().values))
        self.cu.copy_(torch.cat((cuts, torch.tensor([tokens]))))
        lengths = self.cu[1:] - self.cu[:-1]
        self.part.copy_((torch.rand(batch, device="cuda") * (lengths + 1)).floor().clamp(max=lengths))
        for pool in (self.k, self.v):
            pool.fill_(torch.nan)
            for b, length in enumerate(used.tolist()):
                t = torch.arange(length)
                rows = torch.randn(length, *pool.shape[2:]).to(pool)
                pool[pages[b, t // size].cuda(), (t % size).cuda()] = rows

    def varlen(self, parts: bool) -> Varlen:
        return Varlen(self.cu, seqused_q=self.part if parts else None)

    def __call__(self, attn: Any, parts: bool = False) -> Tensor:
        with torch.no_grad():
            paging = Paging(self.table, self.used)
            return attn(self.q, self.k, self.v, paging=paging, varlen=self.varlen(parts))

    def check(self, attn: Any, out: Tensor, parts: bool = False) -> None:
        paging = Paging(self.table.cpu(), self.used.cpu())
        varlen = Varlen(self.cu.cpu(), seqused_q=self.part.cpu() if parts else None)
        given = (x.cpu().double() for x in (self.q, self.k, self.v))
        exact = attn(*given, paging=paging, varlen=varlen)
        assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


PAGES = [(size, (128, 128)) for size in (1, 3, 8, 16, 48, 64, 128, 256)]
WIDTHS = [(16, width) for width in ((64, 64), (96, 96), (192, 128), (192, 192), (256, 256))]


@pytest.mark.parametrize("page_size, widths", [*PAGES, *WIDTHS, (128, (64, 64))])
def test_chunks(page_size: int, widths: tuple[int, int]) -> None:
    """The host waits for nothing once a kernel is there."""
    attn, chunks = fa4flex.compile(mask=causal, score_mod=alibi), Chunks(page_size, *widths)
    for parts in (False, True):
        chunks.check(attn, chunks(attn, parts), parts)
    chunks.change()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, again = chunks(attn), chunks(attn)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chunks.check(attn, out)
    assert torch.equal(out, again)
    fa4flex.synchronize()


def of_documents(ids: Tensor) -> fa4flex.Attention:
    """A mask that is no interval of keys, and differs by head."""
    return fa4flex.compile(mask=lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) | (kv % 5 == h % 5))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_any_mask(page_size: int, packed: bool) -> None:
    """Block tables tell which keys there are; ids, lengths and pages change between replays of a graph."""
    ids = torch.randint(0, 4, (40, 2000), device="cuda")
    attn = of_documents(ids)
    chunks = Chunks(page_size, batch=40 if packed else 4, tokens=500)
    q = torch.randn(4, 8, 300, 128, dtype=torch.bfloat16, device="cuda")

    def step() -> Tensor:
        if packed:
            return chunks(attn)
        with torch.no_grad():
            out: Tensor = attn(q, chunks.k, chunks.v, paging=Paging(chunks.table, chunks.used))
        return out

    graph, out = on_gpus.captured(step)
    for _ in range(5):
        chunks.change()
        ids.random_(0, 4)
        graph.replay()
        here = of_documents(ids.cpu())
        if packed:
            chunks.check(here, out)
        else:
            given = (x.cpu().double() for x in (q, chunks.k, chunks.v))
            exact = here(*given, paging=Paging(chunks.table.cpu(), chunks.used.cpu()))
            assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
        assert torch.equal(step(), out)


@pytest.mark.parametrize("q_len", [65, 300])
def test_dense_queries(q_len: int) -> None:
    attn = fa4flex.compile(mask=causal & sliding_window(400), score_mod=softcap(20.0))
    chunks = Chunks(16)
    q = torch.randn(4, 8, q_len, 128, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        out = attn(q, chunks.k, chunks.v, paging=Paging(chunks.table, chunks.used))
    given = (x.cpu().double() for x in (q, chunks.k, chunks.v))
    exact = attn(*given, paging=Paging(chunks.table.cpu(), chunks.used.cpu()))
    assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


def test_a_graph_reads_tables_and_lengths_anew() -> None:
    attn, chunks = fa4flex.compile(mask=causal), Chunks(16)
    graph, out = on_gpus.captured(lambda: chunks(attn))
    for _ in range(5):
        chunks.change()
        graph.replay()
        chunks.check(attn, out)


@pytest.mark.parametrize("page_size, width", [(16, 128), (64, 64), (8, 96), (1, 128), (3, 64)])
def test_mixed_batches(page_size: int, width: int) -> None:
    """Most sequences have few query rows, some many, and which is which changes between replays. A second
    launch gives the same bits."""
    attn = fa4flex.compile(mask=causal & sliding_window(500), score_mod=alibi)
    chunks = Chunks(page_size, width, width, batch=40, tokens=500)
    graph, out = on_gpus.captured(lambda: chunks(attn))
    for _ in range(10):
        chunks.change()
        graph.replay()
        chunks.check(attn, out)
        assert torch.equal(chunks(attn), out)


@pytest.mark.parametrize("page", [-1, 10**9])
def test_wrong_pages_are_told_by_the_next_call(page: int) -> None:
    attn, chunks = fa4flex.compile(mask=causal), Chunks(16)
    chunks(attn)
    chunks.used[0] = LONGEST
    chunks.cu.copy_(torch.tensor([0, 150, 300, 450, 600]))
    chunks.table[0] = 0
    chunks.table[0, 3] = page
    chunks(attn)
    with pytest.raises(InputError, match=f"page {page} in the page table"):
        fa4flex.synchronize()


# --- appending ----------------------------------------------------------------------------------------------


def on_gpu(given: Tokens) -> Tokens:
    """The same call with tensors on a GPU, of the same strides."""

    def moved(x: Any) -> Any:
        if isinstance(x, Varlen):
            parts = {n: getattr(x, n) for n in ("cu_seqlens_q", "seqused_q") if getattr(x, n) is not None}
            return Varlen(**{name: one.cuda() for name, one in parts.items()})
        if isinstance(x, (Rotary, QKNorm, KVScales)):
            parts = {f.name: getattr(x, f.name) for f in fields(x)}
            return replace(x, **{name: one.cuda() for name, one in parts.items() if isinstance(one, Tensor)})
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return like.copy_(x)

    tensors = (moved(getattr(given, name)) for name in ("k", "v", "k_pool", "v_pool"))
    paging = Paging(given.paging.page_table.cuda(), given.paging.seqused_k.cuda())
    options = {name: moved(x) for name, x in given.options.items()}
    return Tokens(given.how, *tensors, paging, given.rows, options)


@pytest.mark.parametrize("name", HOWS)
def test_append(name: str) -> None:
    """Same results as on a CPU; rotations may be fused there."""
    given = drawn(HOWS[name], (7, 0, 300), (40, 3, 100))
    there = on_gpu(given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    found, exact = there(), given()
    assert torch.equal(found.seqused_k.cpu(), exact.seqused_k)
    pairs = [(there.k_pool, given.k_pool), (there.v_pool, given.v_pool)]
    pairs += [] if exact.q is None else [(found.q, exact.q)]
    pairs += [(x, y) for x, y in zip(there.scales(), given.scales(), strict=True) if y is not None]
    for one, other in pairs:
        one, other = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in (one, other))
        assert torch.equal(one.cpu().isnan(), other.isnan())
        size, eps = other.nan_to_num().abs().max().item(), 2**-4 if given.how.scales else 2**-8
        torch.testing.assert_close(
            one.cpu().nan_to_num(), other.nan_to_num(), atol=2 * 2**-8 * size, rtol=2 * eps
        )
    fa4flex.synchronize()


def test_a_graph_appends_behind_the_last_replay() -> None:
    given = on_gpu(drawn(How(page_size=16, d=64, dv=64), (3, 0, 9), (1, 1, 1)))
    given(in_place=True)
    given.paging.seqused_k.copy_(torch.tensor([3, 0, 9], dtype=torch.int32))
    graph, _ = on_gpus.captured(lambda: given(in_place=True))
    given.paging.seqused_k.copy_(torch.tensor([3, 0, 9], dtype=torch.int32))
    for i in range(4):
        given.k.normal_()
        graph.replay()
        for b, length in enumerate((3, 0, 9)):
            page = given.paging.page_table[b, (length + i) // 16]
            assert torch.equal(given.k_pool[page, (length + i) % 16], given.k[b, :, 0])
    assert given.paging.seqused_k.tolist() == [7, 4, 13]
