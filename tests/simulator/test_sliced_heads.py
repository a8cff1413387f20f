"""Few queries of more heads per KV head than a tile has rows for: several tiles, each of some heads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import test_decode_fp8 as fp8
import torch
from decoding import ALWAYS_ON_BOTH, Size, attend, check, drawn, split_in
from decoding_pages import check as check_pages
from paged_pools import Size as Pool
from paged_pools import drawn as drawn_pages

import fa4flex
from fa4flex import Sinks, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap

SIZES = {
    "128 heads": Size(heads=128, kv_len=150),
    "72 heads, d 128": Size(heads=72, kv_len=131, d=128),
    "8 heads, 9 queries": Size(heads=16, kv_heads=2, q_len=9, kv_len=140),
    "7 heads, 11 queries": Size(heads=14, kv_heads=2, q_len=11, kv_len=129),
    "3 heads, 32 queries": Size(heads=3, q_len=32, kv_len=100, batch=2),
    "32 heads, 3 queries": Size(heads=32, q_len=3, kv_len=301, d=80),
}

MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
    "by head": {"mask": lambda b, h, q, kv: (kv >= 2 * h) & (kv < 40 + 3 * h)},
}


@ALWAYS_ON_BOTH
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 2, 3]))
    mods = random.choice(list(MODS.values()))
    check(fa4flex.compile(**mods), drawn(SIZES[name]))


@ALWAYS_ON_BOTH
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", MODS)
def test_variants(name: str, splits: int, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, splits)
    check(fa4flex.compile(**MODS[name]), drawn(Size(heads=22, kv_heads=2, q_len=7, kv_len=301)))


@ALWAYS_ON_BOTH
def test_sinks_and_used_lengths(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of fewer queries than the longest one leave rows of their tiles empty."""
    split_in(monkeypatch, random.choice([1, 3]))
    used = [torch.tensor([random.randint(0, n), n, 1], dtype=torch.int32) for n in (9, 200)]
    varlen, sinks = Varlen(seqused_q=used[0], seqused_k=used[1]), Sinks(torch.randn(20))
    qkv = drawn(Size(heads=20, kv_heads=2, q_len=9, kv_len=200, batch=3))
    check(fa4flex.compile(mask=causal, sinks=sinks), qkv, varlen=varlen)


@ALWAYS_ON_BOTH
def test_pages(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 2]))
    check_pages(fa4flex.compile(score_mod=alibi, mask=causal), drawn_pages(Pool(heads=40, q_len=3)))


EIGHT_BITS = {
    "d 128": Size(heads=16, kv_heads=2, q_len=5, kv_len=170, d=128),
    "d 192": Size(heads=64, kv_len=140, d=192),
    "d 64": Size(heads=12, q_len=7, kv_len=200, d=64),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bit_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads have tiles of a warp's rows alone, narrow ones of all warps'."""
    split_in(monkeypatch, random.choice([1, 2]))
    attn = fa4flex.compile(score_mod=alibi, mask=causal)
    fp8.check(attn, fp8.drawn(EIGHT_BITS[name]))


def test_bits_do_not_depend_on_heads_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's results are those of a call of fewer heads, in tiles of other rows, under fixed splits."""
    attn = fa4flex.compile(mask=causal, schedule=fa4flex.Schedule(split=64))
    q, k, v = drawn(Size(heads=96, kv_len=200))
    out, lse = attend(attn, q, k, v)
    some, some_lse = attend(attn, q[:, 10:50], k, v)
    assert torch.equal(out[:, 10:50], some) and torch.equal(lse[:, 10:50], some_lse)
