"""Few queries over an e4m3 cache on a GPU: right at sizes that fill it, with every kind of scales, in pages,
and in graphs that read scales anew; faster than 16-bit keys."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import on_gpus
import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import KVScales, Paging, Varlen
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.variants import alibi, causal, sliding_window, softcap

pytestmark = on_gpus.HOPPER


def drawn(
    batch: int, group: int, q_len: int, kv_len: int, d: int, per: str = "head"
) -> tuple[Tensor, Tensor, Tensor, KVScales]:
    """4 KV heads."""
    q = torch.randn(batch, 4 * group, q_len, d, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, 4, kv_len, d, device="cuda").to(E4M3) for _ in range(2))
    shape = {"all": (4,), "head": (batch, 4), "token": (batch, 4, kv_len)}[per]
    return q, k, v, KVScales(*(torch.rand(shape, device="cuda") + 0.2 for _ in range(2)))


def on_cpu(x: Any) -> Any:
    match x:
        case Tensor():
            return x.cpu()
        case KVScales():
            return KVScales(on_cpu(x.k), on_cpu(x.v))
        case Varlen():
            return Varlen(seqused_k=on_cpu(x.seqused_k))
        case Paging():
            return Paging(on_cpu(x.page_table), on_cpu(x.seqused_k))
    return x


def check(attn: Any, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> None:
    """Errors against float64 on the CPU are at most twice the rounding of bfloat16 maths of the same size."""
    with torch.no_grad():
        out, lse = attn(q, k, v, return_lse=True, **more)
        there = {name: on_cpu(x) for name, x in more.items()}
        exact, exact_lse = attn(q.cpu().double(), k.cpu(), v.cpu(), return_lse=True, **there)
    assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=1e-3, rtol=0)


VARIANTS: dict[str, Any] = {
    "causal": {"mask": causal},
    "alibi": {"score_mod": alibi, "mask": causal},
    "soft cap, window": {"score_mod": softcap(30.0), "mask": causal & sliding_window(700)},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("per", ["all", "head", "token"])
def test_sizes_in_few_and_many_blocks(name: str, per: str) -> None:
    attn = fa4flex.compile(**VARIANTS[name])
    for batch, kv_len in ((1, 1), (1, 9000), (3, 70), (40, 1030)):
        for d in (64, 128):
            q_len = random.randint(1, 4)
            q, k, v, scales = drawn(batch, 4, q_len, kv_len, d, per)
            check(attn, q, k, v, kv_scales=scales)


@pytest.mark.parametrize("q_len, d", [(1, 96), (1, 192), (1, 256), (16, 64)])
def test_widths_and_rows(q_len: int, d: int) -> None:
    q, k, v, scales = drawn(3, 4, q_len, 1500, d)
    check(fa4flex.compile(mask=causal), q, k, v, kv_scales=scales)


@pytest.mark.parametrize("q_len, d", [(8, 128), (40, 128)])
def test_more_rows_than_the_kernel_takes(q_len: int, d: int) -> None:
    """The cache is dequantised first, and so rounded to bfloat16: errors are at most twice those of float64
    maths on such a cache."""
    attn = fa4flex.compile(mask=causal)
    q, k, v, scales = drawn(3, 4, q_len, 1500, d)
    with torch.no_grad():
        found = attn(q, k, v, kv_scales=scales, return_lse=True)
    wide = [x.double() * scale.double()[..., None, None] for x, scale in ((k, scales.k), (v, scales.v))]
    attend = partial(attn, q.cpu().double(), return_lse=True)
    exact = attend(*(x.cpu() for x in wide))
    rounded = attend(*(x.bfloat16().double().cpu() for x in wide))
    for one, true, half in zip(found, exact, rounded, strict=True):
        rounding = 2**-8 * true.abs().max() if one.dtype == torch.bfloat16 else 0.0
        assert (one.cpu().double() - true).abs().max() <= 2 * ((half - true).abs().max() + rounding)


def test_every_code_is_the_number_that_it_stands_for() -> None:
    """NaN and subnormal numbers are among them. There is one key, so that the output is the value."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(E4M3)
    v = codes.view(4, 1, 1, 64)
    q = torch.zeros(4, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        out = fa4flex.compile()(q, torch.zeros_like(v), v)
    assert torch.equal(out.flatten().nan_to_num(9999.0), codes.bfloat16().nan_to_num(9999.0))
    k = torch.zeros(4, 1, 2, 64, device="cuda")
    k[:, 0, 0] = codes.float().view(4, 64).nan_to_num(0.0)
    q = torch.eye(64, dtype=torch.bfloat16, device="cuda")[:16].view(1, 1, 16, 64).expand(4, -1, -1, -1)
    with torch.no_grad():
        _, lse = fa4flex.compile(scale=0.01)(q, k.to(E4M3), k.to(E4M3), return_lse=True)
    exact = torch.logaddexp(k[:, 0, 0, :16] * 0.01, torch.zeros(1, device="cuda"))
    torch.testing.assert_close(lse[:, 0], exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("per", ["all", "page", "token"])
def test_pages(per: str) -> None:
    pages, size, d = 400, 16, 128
    q = torch.randn(5, 16, 1, d, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(pages, size, 4, d, device="cuda").to(E4M3) for _ in range(2))
    table = torch.randperm(pages, device="cuda").view(5, 80).to(torch.int32)
    paging = Paging(table, torch.tensor([1280, 1, 700, 0, 33], dtype=torch.int32, device="cuda"))
    shape = {"all": (4,), "page": (pages, 4), "token": (pages, size, 4)}[per]
    scales = KVScales(*(torch.rand(shape, device="cuda") + 0.2 for _ in range(2)))
    check(fa4flex.compile(score_mod=alibi, mask=causal), q, k, v, paging=paging, kv_scales=scales)


def test_a_graph_reads_caches_scales_and_lengths_anew() -> None:
    attn = fa4flex.compile(mask=causal)
    q, k, v, scales = drawn(6, 4, 1, 3000, 128, "token")
    used = torch.full((6,), 3000, dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"varlen": Varlen(seqused_k=used), "kv_scales": scales}
    with torch.no_grad():
        graph, out = on_gpus.captured(lambda: attn(q, k, v, **given))
    for _ in range(3):
        used.copy_(torch.randint(0, 3001, (6,)))
        scales.k.uniform_(0.1, 2.0)  # type: ignore[union-attr]
        graph.replay()
        exact = attn(q.cpu().double(), k.cpu(), v.cpu(), **{n: on_cpu(x) for n, x in given.items()})
        assert (out.cpu().double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()


def test_half_the_bytes_take_less_time() -> None:
    """1.8 times is asked for at this size; a machine that others use may give less."""
    attn = fa4flex.compile(mask=causal)
    q, k, v, scales = drawn(64, 4, 1, 16384, 128)
    wide = k.bfloat16(), v.bfloat16()

    def milliseconds(*given: Any, **more: Any) -> float:
        with torch.no_grad():
            for _ in range(3):
                attn(*given, **more)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                attn(*given, **more)
            end.record()
            torch.cuda.synchronize()
        return start.elapsed_time(end) / 10

    assert milliseconds(q, *wide) >= 1.6 * milliseconds(q, k, v, kv_scales=scales)
