"""Lists of packed, padded and paged sequences on simulated GPUs, over their own indices."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decoding import split_in
from helpers import cumulative
from listed import CHIPS, Called, Size, attend, check, compare, drawn_lists, tensors
from paged_pools import Size as Pages
from paged_pools import drawn as pools

import fa4flex
import ptxsim
from fa4flex import Lists, Varlen
from fa4flex.variants import alibi, causal


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_packed_sequences(chip: Any, seed: int) -> None:
    """Some have no query or key; what lies in others is not read."""
    rng, lengths = random.Random(seed), [3, 0, 5, 1]
    keys = [90, 20, 64, 0]
    attn = fa4flex.compile(alibi, causal)
    q, k, v = (torch.randn(sum(n), h, 64).bfloat16() for n, h in ((lengths, 8), (keys, 2), (keys, 2)))
    size = Size(8, 2, 2, 6, 100, batch=4, lists=rng.choice((1, 4)))
    lists = drawn_lists(rng, size, True, counted=True)
    varlen = Varlen(cumulative(lengths), cumulative(keys))
    found = attend(attn, q, k, v, blocks=lists, varlen=varlen, chip=chip)
    assert found.gathered
    compare(found, *attn(q.double(), k.double(), v.double(), blocks=lists, varlen=varlen, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize("chip", CHIPS)
def test_used_lengths(chip: Any, splits: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Keys past an end are NaN; rows past one are not compared."""
    split_in(monkeypatch, splits)
    rng, size = random.Random(seed), Size(6, 2, 1, 3, 200, batch=3)
    q, k, v = tensors(size)
    used, queries = torch.tensor([200, 65, 0], dtype=torch.int32), (3, 2, 3)
    for b, length in enumerate(used):
        k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    varlen = Varlen(seqused_q=torch.tensor(queries, dtype=torch.int32), seqused_k=used)
    lists, attn = drawn_lists(rng, size, True), fa4flex.compile(mask=causal)
    found = attend(attn, q, k, v, blocks=lists, varlen=varlen, chip=chip)
    assert found.gathered
    wide = (q.double(), k.double().nan_to_num(), v.double().nan_to_num())
    exact, exact_lse = attn(*wide, blocks=lists, varlen=varlen, return_lse=True)
    for b, n in enumerate(queries):
        mine = slice(b, b + 1), slice(None), slice(n)
        compare(Called(found.out[mine], found.lse[mine]), exact[mine], exact_lse[mine])


@pytest.mark.slow
@pytest.mark.parametrize("page", (1, 16, 48))
@pytest.mark.parametrize("chip", CHIPS)
def test_pages(chip: Any, page: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Slots without a key are poisoned, and tables end with numbers of no page."""
    split_in(monkeypatch, random.choice((1, 2)))
    rng, lengths = random.Random(seed), (150, 33, 1)
    d = pools(Pages(heads=8, kv_heads=2, q_len=2, lengths=lengths, page_size=page))
    lists = drawn_lists(rng, Size(8, 2, 2, 2, 160, batch=3, lists=3), True)
    layout: Any = rng.choice(("bhsd", "bshd"))
    attn = fa4flex.compile(mask=causal, layout=layout)
    q = d.q if layout == "bhsd" else d.q.transpose(1, 2).contiguous()
    found = attend(attn, q, d.k, d.v, paging=d.paging, blocks=lists, chip=chip)
    assert found.gathered
    given = (x.double().nan_to_num() for x in (q, d.k, d.v))
    compare(found, *attn(*given, paging=d.paging, blocks=lists, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_packed_queries_over_pages(chip: Any, seed: int) -> None:
    rng, lengths, queries = random.Random(seed), (100, 40), [2, 4]
    d = pools(Pages(heads=4, kv_heads=1, q_len=1, lengths=lengths, page_size=16))
    q = torch.randn(sum(queries), 4, 64).bfloat16()
    lists = drawn_lists(rng, Size(4, 1, 1, 4, 100, batch=2, lists=2), True)
    varlen, attn = Varlen(cumulative(queries)), fa4flex.compile(mask=causal)
    found = attend(attn, q, d.k, d.v, paging=d.paging, varlen=varlen, blocks=lists, chip=chip)
    assert found.gathered
    given = (x.double().nan_to_num() for x in (q, d.k, d.v))
    compare(found, *attn(*given, paging=d.paging, varlen=varlen, blocks=lists, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_a_page_that_is_missing_is_told(chip: Any) -> None:
    d = pools(Pages(heads=2, q_len=1, lengths=(60, 33), page_size=16))
    d.paging.page_table[0, 2] = 10**6
    lists = Lists(torch.tensor([[[[2]]]]), kv_len=100, unit=16, q_len=1)
    attn = fa4flex.compile()
    with torch.no_grad(), ptxsim.device(chip):
        attn(d.q, d.k, d.v, paging=d.paging, blocks=lists)
    with pytest.raises(fa4flex.InputError, match="page 1000000"):
        fa4flex.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_sinks_and_statistics(chip: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Learnable sinks join once, also where a row has no key."""
    rng, size = random.Random(seed), Size(8, 2, 2, 2, 150)
    qkv, lists = tensors(size), drawn_lists(rng, size, counted=True)
    sinks = torch.randn(8)
    attn = fa4flex.compile(mask=causal, sinks=sinks)
    for splits in (1, 2):
        split_in(monkeypatch, splits)
        check(attn, qkv, blocks=lists, chip=chip)
