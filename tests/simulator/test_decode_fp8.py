"""The Hopper kernel for few query rows over an e4m3 cache on the simulated GPU: right against the oracle on
the dequantised cache, as its graph says, and nothing found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from decoding import Size, attend, rounding, split_in
from own_forward import TIMINGS
from test_decode import MODS, nobody
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import KVScales, Paging, Sinks, Varlen, reference
from fa4flex.kernels.decode_fp8_sm90.config import ROWS
from fa4flex.kernels.decode_fp8_sm90.plan import WIDEST
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.variants import alibi, causal

NAN = 0x7F
"""Code of NaN in e4m3."""


@dataclass(frozen=True)
class Call:
    """q of 16 bits, a cache, its scales, and what else a call is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: KVScales | None = None

    @property
    def wide(self) -> tuple[Tensor, Tensor]:
        """The dequantised cache in float64, [B, Hkv, S, D]."""
        scales = self.scales or KVScales()
        return _times(self.k, scales.k), _times(self.v, scales.v)

    def exactly(self, attn: fa4flex.Attention, **more: Any) -> tuple[Tensor, Tensor]:
        return attn(self.q.double(), *self.wide, return_lse=True, **more)  # type: ignore[no-any-return]

    def allowed(self, result: Tensor) -> float:
        """Twice the error of PyTorch's attention at this dtype on the dequantised cache, or twice what such a
        result is rounded by."""
        attention: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
        exact = attention(self.q.double(), *self.wide, enable_gqa=True)
        half = (x.to(self.q.dtype) for x in self.wide)
        error = (attention(self.q, *half, enable_gqa=True).double() - exact).abs().max().item()
        return 2 * max(error, rounding(self.q.dtype) * result.abs().max().item())


def _times(cache: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return cache.double()
    return cache.double() * scale.double().view(*scale.shape, *(1,) * (4 - scale.ndim))


def drawn(size: Size, per: str = "head", dtype: torch.dtype = torch.bfloat16) -> Call:
    s = size
    q = torch.randn(s.batch, s.heads, s.q_len, s.d).to(dtype)
    k, v = (torch.randn(s.batch, s.kv_heads, s.kv_len, s.d).to(E4M3) for _ in range(2))
    shape = {"head": (s.batch, s.kv_heads), "token": (s.batch, s.kv_heads, s.kv_len)}.get(per)
    return Call(q, k, v, None if shape is None else KVScales(*(torch.rand(shape) * 1.5 + 0.1 for _ in "kv")))


def check(attn: fa4flex.Attention, call: Call) -> None:
    out, lse = attend(attn, call.q, call.k, call.v, kv_scales=call.scales)
    exact, exact_lse = call.exactly(attn)
    assert (out.double() - exact).abs().max().item() <= call.allowed(exact)
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
    torch.testing.assert_close(lse.double()[~empty], exact_lse[~empty], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 3]))
    check(fa4flex.compile(**MODS[name]), drawn(Size(kv_len=301, q_len=2), random.choice(["head", "token"])))


SIZES = {
    "64 rows": Size(heads=4, q_len=16, kv_len=150),
    "16 rows, d 128": Size(heads=4, q_len=4, kv_len=150, d=128),
    "7 heads": Size(heads=14, kv_heads=2, q_len=3, kv_len=129),
    "8 heads, 4 queries": Size(heads=8, q_len=4, kv_len=201),
    "d 96": Size(kv_len=140, d=96),
    "d 80": Size(kv_len=140, d=80),
    "d 192": Size(heads=2, kv_len=140, d=192),
    "d 256": Size(heads=2, kv_len=140, d=256),
    "one key": Size(kv_len=1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIZES)
def test_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 2, 5]))
    size = SIZES[name]
    check(fa4flex.compile(mask=causal), drawn(size, random.choice(["", "head", *scales_by_key(size)])))


def scales_by_key(size: Size) -> list[str]:
    """Scales of each key, where the kernel takes them: others are dequantised first, which rounds."""
    rows = size.q_len * size.heads // size.kv_heads
    return ["token"] if size.d <= WIDEST[rows > ROWS, True] else []


def test_some_variant_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant or a size of the tests above, drawn at random."""
    if random.random() < 0.5:
        test_variant(random.choice(list(MODS)), monkeypatch)
    else:
        test_size(random.choice(list(SIZES)), monkeypatch)


def test_all_timings_agree_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """fa4flex.reference, which shares no code with any of this."""
    split_in(monkeypatch, 1)
    call, attn = drawn(Size(kv_len=900, d=128), "token"), fa4flex.compile(score_mod=alibi, mask=causal)
    exact, exact_lse = reference.attention(call.q, *call.wide, alibi, causal)
    first = None
    for timing, seed in TIMINGS:
        with torch.no_grad(), ptxsim.device("sm_90a", seed, timing) as gpu:
            found = attn(call.q, call.k, call.v, kv_scales=call.scales, return_lse=True)
        assert not gpu.findings, gpu.report()
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first)), "the same bits at every timing"
    assert first is not None
    assert (first[0].double() - exact).abs().max().item() <= call.allowed(exact)
    torch.testing.assert_close(first[1].double(), exact_lse, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_any_size(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of bfloat16 queries far beyond float16's range, and with elements far below their largest."""
    split_in(monkeypatch, 1)
    call = drawn(Size(kv_len=70), "head", dtype)
    if dtype == torch.bfloat16:
        factors = torch.tensor([1e20, 1e-20, 1.0, 1e36]).view(1, 4, 1, 1)
        spread = torch.where(torch.rand(call.q.shape) < 0.3, 1e-3, 1.0)
        q = (call.q.float() * factors * spread).bfloat16()
        call = Call(q, call.k, call.v, call.scales)
    attn = fa4flex.compile()
    out, lse = attend(attn, call.q, call.k, call.v, kv_scales=call.scales)
    exact, exact_lse = call.exactly(attn)
    # One key has all weight where queries are large, and all keys the same where they are small.
    assert (out.double() - exact).abs().max().item() <= 4 * rounding(dtype) * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_scales_that_differ_a_thousandfold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small scales come first and large ones later, or the other way round, or all are zero."""
    split_in(monkeypatch, 1)
    call = drawn(Size(kv_len=520), "token")
    for factor in (
        torch.linspace(-10, 10, 520).exp2(),
        torch.linspace(10, -10, 520).exp2(),
        torch.zeros(520),
    ):
        scales = KVScales(call.scales.k, factor.expand(1, 1, -1))  # type: ignore[union-attr]
        check(fa4flex.compile(mask=causal), Call(call.q, call.k, call.v, scales))


@pytest.mark.slow
@pytest.mark.parametrize("per", ["head", "token"])
def test_used_lengths_and_poisoned_tails(per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values past the end of a sequence may be NaN, and so may its scales."""
    split_in(monkeypatch, random.choice([1, 4]))
    call = drawn(Size(q_len=2, kv_len=400, batch=4), per)
    used = torch.tensor([400, 129, 1, 0], dtype=torch.int32)
    clean = Call(call.q, call.k, call.v, call.scales)
    k, v, scales = call.k.view(torch.uint8).clone(), call.v.view(torch.uint8).clone(), call.scales
    assert scales is not None and scales.k is not None and scales.v is not None
    poisoned = KVScales(scales.k.clone(), scales.v.clone())
    for b, length in enumerate(used):
        k[b, :, length:], v[b, :, length:] = NAN, NAN
        for scale in (poisoned.k, poisoned.v) if per == "token" else ():
            scale[b, :, length:] = torch.nan  # type: ignore[index]
    attn = fa4flex.compile(mask=causal)
    varlen = Varlen(seqused_q=torch.tensor([2, 1, 2, 2], dtype=torch.int32), seqused_k=used)
    given = call.q, k.view(E4M3), v.view(E4M3)
    out, lse = attend(attn, *given, varlen=varlen, kv_scales=poisoned)
    exact, exact_lse = clean.exactly(attn, varlen=varlen)
    assert (out.double() - exact).abs().max().item() <= 4 * rounding(out.dtype) * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


def test_nan_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's NaN reaches all of its rows, a value's one column."""
    split_in(monkeypatch, 1)
    call, attn = drawn(Size(kv_heads=2, kv_len=40)), fa4flex.compile()
    call.k.view(torch.uint8)[0, 0, 7, 3] = NAN
    call.v.view(torch.uint8)[0, 1, 30, 5] = NAN | 0x80
    out, _ = attend(attn, call.q, call.k, call.v, kv_scales=call.scales)
    assert out[:, :2].isnan().all()
    wrong = torch.arange(64) == 5
    assert out[:, 2:, :, wrong].isnan().all() and not out[:, 2:, :, ~wrong].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks_join_once(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, splits)
    sinks = torch.tensor([0.5, 3.0, -torch.inf, 1.0])
    call = drawn(Size(kv_len=300))
    for mods in ({"mask": causal}, {"mask": nobody}):
        attn = fa4flex.compile(**mods, sinks=Sinks(sinks))  # type: ignore[arg-type]
        out, lse = attend(attn, call.q, call.k, call.v, kv_scales=call.scales)
        exact, exact_lse = call.exactly(attn)
        assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_layout_bshd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales follow the layout, and may have any strides."""
    split_in(monkeypatch, 2)
    call = drawn(Size(kv_len=300, kv_heads=2), "token")
    scales = KVScales(*(x.transpose(1, 2) for x in (call.scales.k, call.scales.v)))  # type: ignore[union-attr]
    given = (x.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3) for x in (call.k, call.v))
    out, _ = attend(
        fa4flex.compile(mask=causal, layout="bshd"), call.q.transpose(1, 2), *given, kv_scales=scales
    )
    exact, _ = call.exactly(fa4flex.compile(mask=causal))
    assert (out.transpose(1, 2).double() - exact).abs().max().item() <= call.allowed(exact)


@pytest.mark.slow
@pytest.mark.parametrize("per", ["all", "page", "token"])
def test_pages(per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages in any order; what no sequence uses is poisoned, and the table has holes there."""
    split_in(monkeypatch, random.choice([1, 2]))
    size, kv_heads = random.choice([1, 2, 3, 8, 16, 48, 64]), 2
    used = torch.tensor([min(150, 7 * size), 33, 0], dtype=torch.int32)
    live = [-(-int(n) // size) for n in used]
    pages = sum(live) + 4
    table = torch.full((3, max(live) + 2), -1, dtype=torch.int32)
    chosen = torch.randperm(pages).split([*live, pages - sum(live)])
    k, v = (torch.full((pages, size, kv_heads, 64), NAN, dtype=torch.uint8) for _ in range(2))
    shapes = {"all": (kv_heads,), "page": (pages, kv_heads), "token": (pages, size, kv_heads)}
    scales = [torch.full(shapes[per], torch.nan) for _ in range(2)]
    for b, length in enumerate(used):
        token = torch.arange(int(length))
        where = chosen[b][token // size], token % size
        table[b, : live[b]] = chosen[b]
        for cache in (k, v):
            cache[where] = torch.randn(len(token), kv_heads, 64).to(E4M3).view(torch.uint8)
        for scale in scales:
            place = {"all": (), "page": where[:1], "token": where}[per]
            scale[place] = torch.rand(scale[place].shape) + 0.2
    q, paging = torch.randn(3, 4, 2, 64).bfloat16(), Paging(table, used)
    attn, kv_scales = fa4flex.compile(score_mod=alibi, mask=causal), KVScales(*scales)
    out, lse = attend(attn, q, k.view(E4M3), v.view(E4M3), paging=paging, kv_scales=kv_scales)
    exact, exact_lse = attn(
        q.double(), k.view(E4M3), v.view(E4M3), paging=paging, kv_scales=kv_scales, return_lse=True
    )
    assert (out.double() - exact).abs().max().item() <= 4 * rounding(out.dtype) * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


def test_some_ragged_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of the tests of ragged batches above, drawn at random."""
    if random.random() < 0.5:
        test_used_lengths_and_poisoned_tails(random.choice(["head", "token"]), monkeypatch)
    else:
        test_pages(random.choice(["all", "page", "token"]), monkeypatch)


@pytest.mark.slow
def test_without_a_kernel_the_cache_is_dequantised() -> None:
    """Many queries, gradients, a schedule of tiles, Blackwell: launched with 16-bit keys."""
    call, many = drawn(Size(kv_len=100)), drawn(Size(q_len=80, kv_len=100))
    attn = fa4flex.compile(mask=causal)
    tiled = fa4flex.compile(mask=causal, schedule=fa4flex.Schedule(tile=(64, 64)))
    for one, given, arch, trains in (
        (attn, many, "sm_90a", False),
        (tiled, call, "sm_90a", False),
        (attn, call, "sm_90a", True),
        (attn, call, "sm_100a", False),
    ):
        q = given.q.clone().requires_grad_(trains)
        with ptxsim.device(arch) as gpu:
            out = one(q, given.k, given.v, kv_scales=given.scales)
            if trains:
                out.sum().backward()
        assert gpu.results and not any("fp8" in result.kernel for result in gpu.results)
        exact, _ = given.exactly(attn)
        assert (out.double() - exact).abs().max().item() <= given.allowed(exact)
        assert (q.grad is not None) == trains


@pytest.mark.slow
def test_other_scales_and_longer_caches_take_the_same_kernel() -> None:
    attn = fa4flex.compile(mask=causal)
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        for kv_len in (100, 101, 300):
            call = drawn(Size(kv_len=kv_len), "token")
            attn(call.q, call.k, call.v, kv_scales=call.scales)
    assert len({result.kernel for result in gpu.results if "fp8" in result.kernel}) == 1
    assert not gpu.findings
