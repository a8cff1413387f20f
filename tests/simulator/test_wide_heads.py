"""The Hopper kernel for wide heads on the simulated GPU: right against the oracle, as its graph says, and
nothing found, for all widths, masks and lengths, and however many blocks share the keys."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from decoding import split_in
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, Sinks, Varlen, reference
from fa4flex.variants import alibi, causal, sliding_window, softcap

TIMINGS = ("late", "eager", "random")


class Size(NamedTuple):
    """Query heads, KV heads, queries, keys, and columns of q and k, and of v."""

    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    d: int = 512
    dv: int = 512
    batch: int = 1


def drawn(size: Size, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k and v as [B, H, S, D]."""
    b, s = size.batch, size
    shapes = (b, s.heads, s.q_len, s.d), (b, s.kv_heads, s.kv_len, s.d), (b, s.kv_heads, s.kv_len, s.dv)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def attend(attn: fa4flex.Attention, *qkv: Tensor, timing: str = "", **more: Any) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a timing; nothing may be found."""
    timing, seed = timing or random.choice(TIMINGS), random.randrange(99)
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing, sms=2) as gpu:
        out, lse = attn(*qkv, return_lse=True, **more)
    assert any("fwd_wide_sm90" in result.kernel for result in gpu.results), "another kernel was launched"
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def plain_error(truth: Tensor, qkv: list[Tensor], *mods: Any, **options: Any) -> float:
    """Error of the same maths in PyTorch: products of numbers of this dtype, scores and sums in float32,
    probabilities rounded to the dtype, the output last.

    Kernels keep an earlier maximum while a later one is little larger, so what a row's weights are rounded
    against is anywhere between two powers of two: the largest error of 16 such places counts. With the row's
    own maximum alone, which rounds its largest weight exactly, one draw in 60 was past twice the error.
    """
    q, k, v = (x.float() for x in qkv)
    dtype = qkv[0].dtype
    identity = torch.eye(k.shape[2]).double().expand(*k.shape[:2], -1, -1)
    weights, _ = reference.attention(q.double(), k.double(), identity, *mods, **options)
    largest = weights.amax(-1, keepdim=True).clamp(min=1e-30)
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)

    def error(place: float) -> float:
        rounded = (weights / largest * 2**place).to(dtype).double() * largest / 2**place
        return ((rounded @ values).to(dtype).double() - truth).abs().max().item()

    return max(error(i / 16) for i in range(16))


def compare(found: tuple[Tensor, Tensor], qkv: list[Tensor], *mods: Any, **options: Any) -> None:
    """Errors of the worst element are within twice those of the same maths at this dtype; rows without keys
    are zeros."""
    (out, lse), wide = found, [x.double() for x in qkv]
    truth, truth_lse = reference.attention(*wide, *mods, **options)
    assert (out.double() - truth).abs().max().item() <= 2 * plain_error(truth, qkv, *mods, **options)
    empty = truth_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
    torch.testing.assert_close(lse.double()[~empty], truth_lse[~empty], atol=1e-4, rtol=0)


TABLE = torch.randn(16, 1200) / 2


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, q_idx - kv_idx + 600]


def nobody(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Heads from 2 on see no key, and the first queries of others."""
    return (kv_idx < 100 - 50 * h) & (q_idx > 3)


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No intervals: block tables."""
    return (kv_idx * 7 + q_idx + h) % 5 > 1


def rising(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Each tile raises the maxima, in the second half of its keys."""
    return score + 0.4 * kv_idx


MODS: dict[str, tuple[Any, Any]] = {
    "causal": (None, causal),
    "alibi, causal": (alibi, causal),
    "softcap, window": (softcap(20.0), causal & sliding_window(40)),
    "relative": (relative, None),
    "empty rows": (None, nobody),
    "tables": (None, striped),
    "rising": (rising, None),
}


@pytest.mark.slow
def test_right_under_a_timing() -> None:
    """Gemma's heads, two tiles of rows and three of keys."""
    qkv = drawn(Size(4, 2, 40, 150))
    compare(attend(fa4flex.compile(mask=causal), *qkv), qkv, None, causal)


@pytest.mark.slow
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, timing: str) -> None:
    qkv, mods = drawn(Size(4, 2, 37, 150, 264, 320)), MODS[name]
    compare(attend(fa4flex.compile(*mods), *qkv, timing=timing), qkv, *mods)


WIDTHS = (
    *((264, 264), (320, 320), (384, 384), (512, 512), (576, 576), (576, 512), (64, 512), (512, 64)),
    *((448, 296), (272, 520), (568, 8)),
)


@pytest.mark.slow
@pytest.mark.parametrize("d, dv", WIDTHS)
def test_widths(d: int, dv: int) -> None:
    """Heads, values and both, multiples of 8, with odd numbers of queries and keys."""
    qkv = drawn(Size(2, 1, random.randrange(1, 70), random.randrange(1, 140), d, dv))
    compare(attend(fa4flex.compile(mask=causal), *qkv), qkv, None, causal)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "alibi, causal", "softcap, window", "empty rows", "rising"])
@pytest.mark.parametrize("splits", (1, 2, 3))
def test_few_rows(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a tile are split between blocks, of which some may have none."""
    split_in(monkeypatch, splits)
    qkv, mods = drawn(Size(4, 2, random.choice((1, 1, 5)), 260, 320, 264)), MODS[name]
    compare(attend(fa4flex.compile(*mods), *qkv), qkv, *mods)


@pytest.mark.slow
@pytest.mark.parametrize("group", (1, 3, 8, 16))
@pytest.mark.parametrize("q_len", (1, 4, 30))
def test_groups(group: int, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    qkv, sinks = drawn(Size(2 * group, 2, q_len, 90, 272, 272)), torch.randn(2 * group)
    mods = (alibi, causal) if group != 16 else (None, causal)
    attn = fa4flex.compile(*mods, sinks=Sinks(sinks))
    compare(attend(attn, *qkv), qkv, *mods, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("q_len", (1, 45))
def test_padded_batches(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements past the ends are NaN."""
    split_in(monkeypatch, 3, 2)
    lengths = torch.tensor([150, 0, 7, 130], dtype=torch.int32)
    qkv = drawn(Size(4, 2, q_len, 150, 320, 320, batch=4))
    found_in = [x.clone() for x in qkv]
    for b, length in enumerate(lengths.tolist()):
        for x in found_in[1:]:
            x[b, :, length:] = torch.nan
    attn = fa4flex.compile(softcap(20.0))
    out, lse = attend(attn, *found_in, varlen=Varlen(seqused_k=lengths))
    for b, length in enumerate(lengths.tolist()):
        one = [qkv[0][b : b + 1], *[x[b : b + 1, :, :length] for x in qkv[1:]]]
        if length:
            compare((out[b : b + 1], lse[b : b + 1]), one, softcap(20.0))
        else:
            assert not out[b].any() and (lse[b] == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, causal], ids=["all", "causal"])
def test_packed_sequences(mask: Any) -> None:
    ends_q = torch.tensor([0, 33, 34, 34, 110], dtype=torch.int32)
    ends_k = torch.tensor([0, 70, 71, 90, 170], dtype=torch.int32)
    q = torch.randn(int(ends_q[-1]), 4, 512).bfloat16()
    k, v = (torch.randn(int(ends_k[-1]), 2, width).bfloat16() for width in (512, 384))
    attn = fa4flex.compile(mask=mask)
    out, lse = attend(attn, q, k, v, varlen=Varlen(ends_q, ends_k))
    for (q0, q1), (k0, k1) in zip(ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist()):
        if q1 > q0:
            one = [x[None, i:j].transpose(1, 2) for x, i, j in ((q, q0, q1), (k, k0, k1), (v, k0, k1))]
            compare((out[None, q0:q1].transpose(1, 2), lse[None, :, q0:q1]), one, None, mask)


@pytest.mark.slow
@pytest.mark.parametrize("q_len", (1, 70))
def test_float16_and_float32_output(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    qkv = drawn(Size(2, 1, q_len, 130, 384, 512), torch.float16)
    compare(attend(fa4flex.compile(mask=causal), *qkv), qkv, None, causal)
    attn = fa4flex.compile(mask=causal, precision=fa4flex.Precision(output=torch.float32))
    out, _ = attend(attn, *qkv)
    truth, _ = reference.attention(*[x.double() for x in qkv], None, causal)
    assert out.dtype == torch.float32
    assert (out.double() - truth).abs().max().item() <= 2 * plain_error(truth, qkv, None, causal)


@pytest.mark.slow
def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = drawn(Size(2, 1, 70, 100, 264, 264))
    for schedule in (Schedule(tile=(64, 32)), Schedule(order="row_major"), Schedule(next_tile="in_turn")):
        attn = fa4flex.compile(mask=causal, schedule=schedule)
        compare(attend(attn, *qkv), qkv, None, causal)
    few = [qkv[0][:, :, -1:], *qkv[1:]]
    compare(attend(fa4flex.compile(schedule=Schedule(split=64)), *few), few)
    with pytest.raises(fa4flex.UnsupportedError, match=r"\(64, 64\)"):
        attend(fa4flex.compile(schedule=Schedule(tile=(128, 64))), *qkv)
