"""The Hopper kernel for listed latent rows on the simulated GPU: right against the oracle, as its graph says,
and nothing found, whatever lists hold, however rows lie and heads fall into tiles, and however many blocks
share the keys."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decoding import split_in
from helpers import cumulative
from listed import TIMINGS, Size, allowed_pairs, drawn_lists, striped
from own_calls import poisoned
from paged_pools import Size as Pages
from paged_pools import drawn as pools
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Latent, LatentFormat, Lists, Paging, Sinks, Varlen, reference
from fa4flex.primitives.mask import as_mask
from fa4flex.variants import alibi, causal, sliding_window, softcap

WIDTH, VALUE, SCALE = 576, 512, 192**-0.5

Results = tuple[Tensor, Tensor]


def drawn(size: Size, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> Results:
    """Queries [B, H, Sq, width] and rows [B, S, 1, width]."""
    q = torch.randn(size.batch, size.heads, size.q_len, width).to(dtype)
    return q, torch.randn(size.batch, size.kv_len, 1, width).to(dtype)


def attend(
    attn: fa4flex.Attention, q: Tensor, rows: Latent, timing: tuple[str, int] | None = None, **more: Any
) -> Results:
    """Results from the simulated GPU, in memory that is poisoned before; nothing may be found."""
    name, seed = timing or random.choice((*TIMINGS, ("random", random.randrange(99))))
    with torch.no_grad(), poisoned(), ptxsim.device("sm_90a", seed, name, sms=2) as gpu:
        out, lse = attn(q, rows, return_lse=True, **more)
    assert any("mla_lists_sm90" in x.kernel for x in gpu.results), "another kernel was launched"
    assert not gpu.findings, f"{name} {seed}: {gpu.report()}"
    return out, lse


def compare(found: Results, truth: Results) -> None:
    """Out [B, H, S, 512] and lse [B, H, S]. The worst element and the worst row are within twice the rounding
    of probabilities and output; rows without keys are zeros."""
    (out, lse), (wide, wide_lse) = found, truth
    rounding, error = torch.finfo(out.dtype).eps / 2, out.double() - wide
    assert error.abs().max().item() <= 2 * rounding * wide.abs().max().item()
    assert error.norm(dim=-1).max().item() <= 2 * rounding * wide.norm(dim=-1).max().item()
    empty = wide_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
    torch.testing.assert_close(lse.double()[~empty], wide_lse[~empty], atol=1e-4, rtol=0)


def exact(q: Tensor, rows: Tensor, lists: Lists, size: Size, mods: tuple[Any, Any], **more: Any) -> Results:
    """The formula over the pairs that are listed and allowed, in float64."""
    pairs, (score_mod, mask) = allowed_pairs(lists, size), mods
    listed = lambda b, h, q_idx, kv_idx: pairs[b, h, q_idx, kv_idx]  # noqa: E731
    both = listed if mask is None else as_mask(mask) & listed
    k = rows.double().transpose(1, 2)
    return reference.attention(q.double(), k, k[..., :VALUE].clone(), score_mod, both, scale=SCALE, **more)


TABLE = torch.randn(16, 700) / 2


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, q_idx - kv_idx + 600]


def nobody(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Heads from 2 on see no key."""
    return kv_idx < 100 - 50 * h


def rising(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Later keys raise the maxima."""
    return score + 0.3 * kv_idx


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "alibi, causal": (alibi, causal),
    "softcap, window": (softcap(20.0), causal & sliding_window(90)),
    "relative": (relative, None),
    "empty rows": (None, nobody),
    "pairs": (None, striped),
    "rising": (rising, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", (False, True), ids=("lists alone", "keys beside"))
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, beside: bool, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Masks and mods see the index of each key; a key that is listed and seen besides counts once."""
    rng, mods = random.Random(seed), MODS[name]
    split_in(monkeypatch, rng.choice((1, 2, 3)))
    size = Size(rng.choice((3, 16)), 1, 1, 2, rng.choice((40, 200, 301)))
    (q, rows), lists = drawn(size), drawn_lists(rng, size, beside, counted=rng.random() < 0.5)
    found = attend(fa4flex.compile(*mods, scale=SCALE), q, Latent(rows), blocks=lists)
    compare(found, exact(q, rows, lists, size, mods))


SIZES = {
    "one key": (1, 1, 1, 1, 1),
    "64 heads": (64, 1, 1, 1, 140),
    "128 heads, two tiles": (128, 1, 1, 1, 300),
    "33 heads, 2 tokens of a list: tiles of 33": (33, 2, 2, 1, 129),
    "16 heads, 5 tokens of a list": (16, 6, 5, 1, 150),
    "2 heads, 40 tokens of a list": (2, 45, 40, 1, 200),
    "heads with lists of their own": (6, 2, 1, 3, 150),
    "prefill": (4, 9, 1, 1, 100),
}
"""Heads, queries, queries that share a list, heads of lists, and keys."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing[0])
def test_rows_fall_into_tiles(
    name: str, timing: tuple[str, int], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    heads, q_len, queries, list_heads, kv_len = SIZES[name]
    rng, size = random.Random(seed), Size(heads, 1, list_heads, q_len, kv_len)
    split_in(monkeypatch, rng.choice((1, 2)))
    (q, rows), mods = drawn(size), (alibi, causal)
    lists = drawn_lists(rng, size, rng.random() < 0.5, queries=queries)
    found = attend(fa4flex.compile(*mods, scale=SCALE), q, Latent(rows), timing, blocks=lists)
    compare(found, exact(q, rows, lists, size, mods))


@pytest.mark.slow
@pytest.mark.parametrize("unit", (1, 4, 16, 64))
def test_units_float16_and_layout_bshd(unit: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, size = random.Random(seed), Size(8, 1, 1, 2, 300, batch=2, lists=2)
    split_in(monkeypatch, 2)
    q, rows = drawn(size, torch.float16)
    lists = drawn_lists(rng, size, True, unit=unit, dtype=torch.int64)
    attn = fa4flex.compile(mask=causal, scale=SCALE, layout="bshd")
    out, lse = attend(attn, q.transpose(1, 2).contiguous(), Latent(rows), blocks=lists)
    compare((out.transpose(1, 2), lse), exact(q, rows, lists, size, (None, causal)))


@pytest.mark.slow
@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing[0])
def test_rows_that_are_all_value(timing: tuple[str, int], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rows of 512 columns, the rotated ones among their values: probabilities have room of their own."""
    rng, size, mods = random.Random(seed), Size(16, 1, 1, 2, 400), (None, causal)
    split_in(monkeypatch, rng.choice((1, 2)))
    (q, rows), lists = drawn(size, width=VALUE), drawn_lists(rng, size, True, unit=1, capacity=160)
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    compare(attend(attn, q, Latent(rows), timing, blocks=lists), exact(q, rows, lists, size, mods))


@pytest.mark.slow
def test_repeated_ids_count_once() -> None:
    """Ids in any order, of which many stand twice or more, some in other splits."""
    size = Size(4, 1, 1, 2, 900)
    q, rows = drawn(size)
    ids = torch.randint(-1, 901, (1, 1, 2, 1500), dtype=torch.int32)
    lists = Lists(ids, kv_len=900)
    found = attend(fa4flex.compile(scale=SCALE), q, Latent(rows), blocks=lists)
    compare(found, exact(q, rows, lists, size, (None, None)))


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
def test_what_is_not_listed_is_not_read(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other rows are NaN; rows of a wider cache are read where they lie."""
    split_in(monkeypatch, splits)
    size = Size(8, 1, 1, 1, 260)
    q, rows = drawn(size)
    wide = torch.full((1, 260, 1, 640), torch.nan, dtype=rows.dtype)
    lists = Lists(torch.randperm(65)[:40].view(1, 1, 1, 40), kv_len=260, unit=4)
    listed = lists.classes()[0, 0, 0].bool().repeat_interleave(4)
    wide[:, listed, :, :WIDTH] = rows[:, listed]
    found = attend(fa4flex.compile(scale=SCALE), q, Latent(wide[..., :WIDTH]), blocks=lists)
    compare(found, exact(q, rows, lists, size, (None, None)))


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
def test_sinks_join_once(splits: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Also where a row has no key but the sink."""
    split_in(monkeypatch, splits)
    sinks, size = torch.tensor([0.5, 3.0, -torch.inf, 1.0]), Size(4, 1, 1, 1, 200)
    (q, rows), lists = drawn(size), drawn_lists(random.Random(seed), size)
    attn = fa4flex.compile(mask=nobody, sinks=Sinks(sinks), scale=SCALE)
    out, lse = attend(attn, q, Latent(rows), blocks=lists)
    truth, truth_lse = exact(q, rows, lists, size, (None, nobody), sinks=sinks)
    assert (out.double() - truth).abs().max().item() <= 2 * 2**-8 * truth.abs().max().item()
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_parts_of_a_fixed_size_hold_all_keys(seed: int) -> None:
    """Keys beside lists have tiles of their own, for which there has to be a part."""
    rng, size = random.Random(seed), Size(4, 1, 1, 1, 400)
    (q, rows), lists = drawn(size), drawn_lists(rng, size, True)
    attn = fa4flex.compile(mask=causal, scale=SCALE, schedule=fa4flex.Schedule(split=128))
    found = attend(attn, q, Latent(rows), blocks=lists)
    compare(found, exact(q, rows, lists, size, (None, causal)))


@pytest.mark.slow
@pytest.mark.parametrize("heads", (64, 128))
def test_each_tile_gathers_a_row_once(heads: int) -> None:
    """Bytes that are written row by row, besides queries: a row is key and value. Two tiles of 128 rows have
    zeros where there are no more of the 150."""
    q, rows = drawn(Size(heads, 1, 1, 1, 400))
    ids = torch.randperm(400)[:150].sort().values.int().view(1, 1, 1, -1)
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2) as gpu:
        fa4flex.compile(scale=SCALE)(q, Latent(rows), blocks=Lists(ids, kv_len=400))
    (result,) = (x for x in gpu.results if "mla_lists_sm90" in x.kernel)
    lines = {x.line for x in result.program.kernel.body if x.opcode.startswith("cp.async.cg")}
    gathered = sum(size for line, size in result.shared.items() if line in lines)
    splits = result.shape.grid[0] // (heads // 64)
    assert gathered == (heads // 64) * (256 + splits * 64) * 2 * WIDTH


# --- lengths and pages --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("splits", (1, 2))
def test_used_lengths(splits: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Keys past an end are NaN; rows past one are not compared."""
    split_in(monkeypatch, splits)
    rng, size = random.Random(seed), Size(6, 1, 1, 3, 200, batch=3)
    q, rows = drawn(size)
    used, queries = torch.tensor([200, 65, 0], dtype=torch.int32), (3, 2, 3)
    for b, length in enumerate(used):
        rows[b, length:] = torch.nan
    varlen = Varlen(seqused_q=torch.tensor(queries, dtype=torch.int32), seqused_k=used)
    lists, attn = drawn_lists(rng, size, True), fa4flex.compile(mask=causal, scale=SCALE)
    out, lse = attend(attn, q, Latent(rows), blocks=lists, varlen=varlen)
    wide = q.double(), Latent(rows.double().nan_to_num())
    truth, truth_lse = attn(*wide, blocks=lists, varlen=varlen, return_lse=True)
    for b, n in enumerate(queries):
        compare(
            (out[b, None, :, :n], lse[b, None, :, :n]), (truth[b, None, :, :n], truth_lse[b, None, :, :n])
        )


@pytest.mark.slow
def test_packed_sequences(seed: int) -> None:
    """Some have no query or key; what lies in others is not read."""
    rng, lengths, keys = random.Random(seed), [3, 0, 5, 1], [90, 20, 64, 0]
    q, rows = torch.randn(sum(lengths), 8, WIDTH).bfloat16(), torch.randn(sum(keys), 1, WIDTH).bfloat16()
    size = Size(8, 1, 1, 6, 100, batch=4, lists=rng.choice((1, 4)))
    lists, attn = drawn_lists(rng, size, True, counted=True), fa4flex.compile(alibi, causal, scale=SCALE)
    varlen = Varlen(cumulative(lengths), cumulative(keys))
    out, lse = attend(attn, q, Latent(rows), blocks=lists, varlen=varlen)
    truth, truth_lse = attn(q.double(), Latent(rows.double()), blocks=lists, varlen=varlen, return_lse=True)
    compare((out.transpose(0, 1), lse), (truth.transpose(0, 1), truth_lse))


@pytest.mark.slow
@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("page", (1, 16, 64))
def test_pages(page: int, packed: bool, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Slots without a key are poisoned, pages lie in any order, and tables end with numbers of no page."""
    split_in(monkeypatch, random.choice((1, 2)))
    rng, lengths = random.Random(seed), (150, 33, 1)
    d = pools(Pages(heads=8, q_len=2, lengths=lengths, d=WIDTH, dv=WIDTH, page_size=page))
    lists = drawn_lists(rng, Size(8, 1, 1, 2, 160, batch=3, lists=3), True)
    layout: Any = rng.choice(("bhsd", "bshd"))
    attn = fa4flex.compile(mask=causal, scale=SCALE, layout=layout)
    q, more = d.q if layout == "bhsd" else d.q.transpose(1, 2).contiguous(), {"paging": d.paging}
    if packed:
        q = d.q.transpose(1, 2).flatten(0, 1)
        more["varlen"] = Varlen(torch.arange(4, dtype=torch.int32) * 2)
    out, lse = attend(attn, q, Latent(d.k), blocks=lists, **more)
    wide = q.double(), Latent(d.k.double().nan_to_num())
    truth, truth_lse = attn(*wide, blocks=lists, return_lse=True, **more)
    if packed:
        out, truth = (x.transpose(0, 1) for x in (out, truth))
    elif layout == "bshd":
        out, truth = (x.transpose(1, 2) for x in (out, truth))
    compare((out, lse), (truth, truth_lse))


@pytest.mark.slow
def test_a_page_that_is_missing_is_told() -> None:
    d = pools(Pages(heads=2, q_len=1, lengths=(60, 33), d=WIDTH, dv=WIDTH, page_size=16))
    d.paging.page_table[0, 2] = 10**6
    lists = Lists(torch.tensor([[[[2]]]]), kv_len=100, unit=16, q_len=1)
    with torch.no_grad(), ptxsim.device("sm_90a"):
        fa4flex.compile(scale=SCALE)(d.q, Latent(d.k), paging=d.paging, blocks=lists)
    with pytest.raises(fa4flex.InputError, match="page 1000000"):
        fa4flex.synchronize()


# --- other ways ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bytes_of_a_format_are_dequantised_first(seed: int) -> None:
    rng, size, form = random.Random(seed), Size(4, 1, 1, 1, 128), LatentFormat.DEEPSEEK_V3_2
    stored = torch.randint(0, 120, (8, 16, 1, form.row_bytes), dtype=torch.uint8)
    stored[..., 512:528] = (torch.rand(8, 16, 1, 4) / 99).view(torch.uint8)
    stored[..., 528:] = torch.randn(8, 16, 1, 64).bfloat16().view(torch.uint8)
    lists, q = drawn_lists(rng, size, True), drawn(size)[0]
    paging = Paging(torch.randperm(8, dtype=torch.int32)[None], torch.tensor([120], dtype=torch.int32))
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    found = attend(attn, q, Latent(stored, format=form), blocks=lists, paging=paging)
    rows = form.decoded(stored, torch.bfloat16)
    compare(found, attn(q.double(), Latent(rows.double()), blocks=lists, paging=paging, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize("cast", (False, True), ids=("bfloat16", "autocast"))
def test_rows_that_lie_badly_and_autocast(cast: bool, seed: int) -> None:
    """Rows that no copy of 16 bytes can begin at are copied first; autocast casts queries and rows."""
    rng, size = random.Random(seed), Size(4, 1, 1, 1, 200)
    (q, rows), lists = drawn(size, torch.float32, 580), drawn_lists(rng, size, True)
    q, rows = (x if cast else x.bfloat16() for x in (q[..., :WIDTH], rows))
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        found = attend(attn, q, Latent(rows[..., :WIDTH]), blocks=lists)
    rounded = q.bfloat16(), rows[..., :WIDTH].bfloat16()
    assert found[0].dtype == torch.bfloat16
    compare(found, exact(*rounded, lists, size, (None, causal)))


@pytest.mark.slow
@pytest.mark.parametrize("trains", (False, True))
def test_narrow_rows_are_views_for_the_kernel_of_listed_keys(trains: bool, seed: int) -> None:
    rng, size = random.Random(seed), Size(4, 1, 1, 2, 100)
    q, rows = torch.randn(1, 4, 2, 96).bfloat16(), torch.randn(1, 100, 1, 96).bfloat16()
    lists, attn = drawn_lists(rng, size, True), fa4flex.compile(mask=causal, scale=SCALE)
    results = []
    for given in ((q, rows), (q.double(), rows.double())):
        given = tuple(x.clone().requires_grad_(trains) for x in given)
        with ptxsim.device("sm_90a", 0, "eager") as gpu:
            on_gpu = given[0].dtype == torch.bfloat16
            out = attn(given[0], Latent(given[1], 64, 32), blocks=lists) if on_gpu else None
            grads = torch.autograd.grad(out.float().sum(), given) if on_gpu and trains else ()
        if on_gpu:
            assert any("kernelslists_sm90" in x.kernel for x in gpu.results)
        else:
            out = attn(given[0], Latent(given[1], 64, 32), blocks=lists)
            grads = torch.autograd.grad(out.sum(), given) if trains else ()
        results.append((out, *grads))
    for i, (x, y) in enumerate(zip(*results, strict=True)):
        assert (x.double() - y).abs().max() <= (2 if i == 0 else 4) * 2**-8 * y.abs().max()
