"""Few queries on a GPU: right at sizes that fill it, without waiting for the host, in graphs that read
lengths anew, and with fixed parts of keys the same bits in any batch."""

from __future__ import annotations

import random
from typing import Any

import on_gpus
import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import Schedule, Sinks, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap

pytestmark = on_gpus.ANY

HEADS = {1: 8, 4: 2, 7: 4, 8: 4}
"""Heads of keys by the heads that share one."""


def drawn(batch: int, group: int, q_len: int, kv_len: int, d: int) -> list[Tensor]:
    kv_heads = HEADS[group]
    shapes = (batch, group * kv_heads, q_len, d), *[(batch, kv_heads, kv_len, d)] * 2
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def check(attn: Any, qkv: list[Tensor], **more: Any) -> None:
    """Against float64 on the CPU; at most twice the rounding of bfloat16 maths of the same size."""
    with torch.no_grad():
        out, lse = attn(*qkv, return_lse=True, **more)
        there = {name: varlen_on_cpu(x) for name, x in more.items()}
        exact, exact_lse = attn(*(x.cpu().double() for x in qkv), return_lse=True, **there)
    assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=1e-3, rtol=0)


def varlen_on_cpu(x: Varlen) -> Varlen:
    return Varlen(seqused_q=None if x.seqused_q is None else x.seqused_q.cpu(), seqused_k=x.seqused_k.cpu())  # type: ignore[union-attr]


VARIANTS: dict[str, Any] = {
    "causal": {"mask": causal},
    "alibi": {"score_mod": alibi, "mask": causal},
    "soft cap, window": {"score_mod": softcap(30.0), "mask": causal & sliding_window(700)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_sizes_in_few_and_many_blocks(name: str) -> None:
    attn = fa4flex.compile(**VARIANTS[name])
    for batch, kv_len in ((1, 1), (1, 9000), (3, 70), (40, 1030)):
        group = random.choice(list(HEADS))
        for d in (64, 128):
            q_len = random.randint(1, min(16, 64 // group))
            check(attn, drawn(batch, group, q_len, kv_len, d))


def test_sinks() -> None:
    sinks = torch.randn(8, device="cuda")
    for kv_len in (3, 5000):
        qkv = drawn(2, 4, 2, kv_len, 128)
        with torch.no_grad():
            out = fa4flex.compile(mask=causal, sinks=Sinks(sinks))(*qkv)
            exact = fa4flex.compile(mask=causal, sinks=Sinks(sinks.cpu()))(*(x.cpu().double() for x in qkv))
        assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


def test_gradients() -> None:
    qkv = [x.requires_grad_() for x in drawn(2, 4, 3, 900, 64)]
    attn = fa4flex.compile(score_mod=alibi, mask=causal)
    dout = torch.randn_like(qkv[0])
    found = torch.autograd.grad(attn(*qkv), qkv, dout)
    there = [x.detach().cpu().double().requires_grad_() for x in qkv]
    exact = torch.autograd.grad(attn(*there), there, dout.cpu().double())
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double() / b.abs().max(), b / b.abs().max(), atol=2e-2, rtol=0)


def test_a_growing_cache_waits_for_nothing() -> None:
    attn = fa4flex.compile(mask=causal)
    q, k, v = drawn(2, 4, 1, 2000, 128)
    with torch.no_grad():
        attn(q, k[:, :, :1000], v[:, :, :1000])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs = {n: attn(q, k[:, :, :n], v[:, :, :n]) for n in (1000, 1001, 1063, 1064, 1999, 2000)}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for n, out in outs.items():
            exact = attn(*(x.cpu().double() for x in (q, k[:, :, :n], v[:, :, :n])))
            assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


def test_a_graph_reads_lengths_anew() -> None:
    attn = fa4flex.compile(mask=causal)
    q, k, v = drawn(6, 4, 2, 3000, 128)
    used = torch.full((6,), 3000, dtype=torch.int32, device="cuda")
    varlen = Varlen(seqused_k=used)
    with torch.no_grad():
        graph, outs = on_gpus.captured(lambda: [attn(q, k, v, varlen=varlen) for _ in range(2)])
    for _ in range(5):
        used.copy_(torch.randint(0, 3001, (6,)))
        graph.replay()
        exact = attn(*(x.cpu().double() for x in (q, k, v)), varlen=Varlen(seqused_k=used.cpu()))
        for out in outs:
            assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


def test_fixed_parts_have_the_same_bits_in_any_batch() -> None:
    attn = fa4flex.compile(mask=causal, schedule=Schedule(split=512))
    q, k, v = drawn(8, 4, 1, 6000, 128)
    used = torch.randint(1, 6001, (8,), dtype=torch.int32, device="cuda")
    with torch.no_grad():
        whole = attn(q, k, v, varlen=Varlen(seqused_k=used), return_lse=True)
        for _ in range(1000):
            some = torch.randperm(8, device="cuda")[: random.randint(1, 8)]
            kept = random.randint(int(used[some].max()), 6000)
            qkv = q[some], k[some, :, :kept], v[some, :, :kept]
            found = attn(*qkv, varlen=Varlen(seqused_k=used[some]), return_lse=True)
            assert all(torch.equal(mine, x[some]) for mine, x in zip(found, whole))
