"""The kernels for few query rows on the simulated GPU: right against the oracle, as their graphs say, and
nothing found, however many blocks share the keys. All of it on Blackwell is exhaustive; some is in
test_decode_blackwell.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decoding import SIMULATED, Size, attend, check, drawn, split_in
from helpers import of_passes

import fa4flex
import ptxsim
from fa4flex import Sinks, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap

TABLE = torch.randn(8, 700) / 2

pytestmark = pytest.mark.usefixtures("chip")


def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + TABLE[h, q_idx - kv_idx + 600]


def by_head(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """A window that is wider for later heads, and begins later."""
    return (kv_idx >= 20 * h) & (kv_idx < 70 + 45 * h)


def nobody(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Heads from 2 on see no key."""
    return kv_idx < 100 - 50 * h


MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": causal},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
    "relative": {"score_mod": relative},
    "by head": {"mask": by_head},
    "empty rows": {"mask": nobody},
}


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, splits)
    check(fa4flex.compile(**MODS[name]), drawn(Size(kv_len=301, q_len=2)))


SIZES = {
    "64 rows, d 128": Size(heads=4, q_len=16, kv_len=150, d=128),
    "32 heads": Size(heads=32, kv_len=150),
    "33 rows": Size(heads=33, kv_len=150),
    "7 heads": Size(heads=14, kv_heads=2, q_len=3, kv_len=129),
    "8 heads, 5 queries, d 128": Size(heads=8, q_len=5, kv_len=201, d=128),
    "own heads": Size(heads=2, kv_heads=2, q_len=9, kv_len=63, batch=2),
    "d 96": Size(kv_len=140, d=96),
    "d 80": Size(kv_len=140, d=80),
    "d 192": Size(heads=2, kv_len=140, d=192),
    "d 256": Size(heads=2, kv_len=140, d=256),
    "one key": Size(kv_len=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_size(name: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 2, 5]))
    size = SIZES[name]
    check(fa4flex.compile(score_mod=alibi, mask=causal), drawn(size))


def test_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    check(fa4flex.compile(mask=causal), drawn(Size(d=128), torch.float16))


@pytest.mark.parametrize("splits", [1, 2])
def test_sinks_join_once(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row has no key but the sink."""
    split_in(monkeypatch, splits)
    sinks = torch.tensor([0.5, 3.0, -torch.inf, 1.0])
    qkv = drawn(Size(kv_len=200))
    for mods in ({"mask": causal}, {"mask": nobody}):
        attn = fa4flex.compile(**mods, sinks=Sinks(sinks))  # type: ignore[arg-type]
        out, lse = attend(attn, *qkv)
        exact, exact_lse = attn(*(x.double() for x in qkv), return_lse=True)
        assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("splits", [1, 4])
def test_used_lengths(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence's own keys are split; what lies past its end may be anything."""
    split_in(monkeypatch, splits)
    q, k, v = drawn(Size(q_len=2, kv_len=400, batch=4))
    used = torch.tensor([400, 129, 1, 0], dtype=torch.int32)
    for b, length in enumerate(used):
        k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    attn = fa4flex.compile(mask=causal)
    varlen = Varlen(seqused_q=torch.tensor([2, 1, 2, 2], dtype=torch.int32), seqused_k=used)
    out, lse = attend(attn, q, k, v, varlen=varlen)
    clean = [x.nan_to_num().double() for x in (q, k, v)]
    exact, exact_lse = attn(*clean, return_lse=True, varlen=varlen)
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


def test_layout_bshd(monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    q, k, v = (x.transpose(1, 2).contiguous() for x in drawn(Size(kv_len=300)))
    attn = fa4flex.compile(mask=causal, layout="bshd")
    out, _ = attend(attn, q, k, v)
    exact = attn(*(x.double() for x in (q, k, v)))
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()


def test_gradients() -> None:
    """The backward pass needs the output and the log-sum-exp alone."""
    qkv = [x.requires_grad_() for x in drawn(Size(kv_len=150, q_len=3))]
    attn = fa4flex.compile(mask=causal)
    with ptxsim.device(SIMULATED["chip"]) as gpu:
        out = attn(*qkv)
        found = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert not gpu.findings and any("decode" in result.kernel for result in gpu.results)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact = torch.autograd.grad(attn(*wide), wide, torch.ones_like(out).double())
    for a, b in zip(found, exact):
        assert (a.double() - b).abs().max().item() <= 4 * 2**-8 * b.abs().max().item()


def test_a_longer_cache_is_the_same_kernel() -> None:
    attn = fa4flex.compile(mask=causal)
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"]) as gpu:
        for kv_len in (100, 101, 300):
            attn(*drawn(Size(kv_len=kv_len)))
    kernels = {result.kernel for result in of_passes(gpu) if "decode" in result.kernel}
    assert len(kernels) == 1 and not gpu.findings


def test_fixed_parts_do_not_depend_on_the_batch() -> None:
    """The same bits for a sequence alone and among longer ones, in a longer tensor."""
    attn = fa4flex.compile(score_mod=alibi, mask=causal, schedule=fa4flex.Schedule(split=100))
    q, k, v = drawn(Size(q_len=2, kv_len=500, batch=3))
    used = torch.tensor([130, 500, 77], dtype=torch.int32)
    out, lse = attend(attn, q, k, v, varlen=Varlen(seqused_k=used))
    for b, length in enumerate(used):
        for kept in (int(length), 400 if length < 400 else 500):
            one = [x[b : b + 1, :, :kept] for x in (k, v)]
            alone, alone_lse = attend(attn, q[b : b + 1], *one, varlen=Varlen(seqused_k=used[b : b + 1]))
            assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])
