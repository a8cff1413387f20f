"""Lists of keys over latent rows: what a call of each arrangement means pair by pair, against the oracle; and
what a GPU without a kernel for it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Latent, LatentFormat, Lists, Paging, UnsupportedError, Varlen, reference
from fa4flex.variants import alibi, causal, sliding_window, softcap

B, H, SQ, S, USED = 2, 4, 3, 150, 77
VALUE, ROPE = 16, 8
WIDTH, SCALE = VALUE + ROPE, 12**-0.5
LENGTHS = S, USED


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx + q_idx * h) % 3 > 0


MODS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "alibi, causal": (alibi, causal),
    "softcap, window": (softcap(5.0), causal & sliding_window(60)),
    "no intervals": (None, striped),
}


def drawn_lists(rng: random.Random, unit: int, beside: bool) -> Lists:
    """Ids of none, of units past the end of a sequence and past that of all, and ids that stand twice."""
    queries, batch, heads = rng.choice((1, 2)), rng.choice((1, B)), rng.choice((1, 2, H))
    units, rows, entries = -(-S // unit), -(-SQ // queries), rng.choice((1, 6, 20))
    ids = torch.randint(
        -2, units + 2, (batch, heads, rows, entries), dtype=rng.choice((torch.int32, torch.int64))
    )
    ids[..., -1] = ids[..., 0]
    counts = torch.randint(0, entries + 1, ids.shape[:3]) if rng.random() < 0.5 else None
    seen = {"tail": rng.choice((0, 1, 2)), "window": rng.choice((0, 5, 40)), "sinks": rng.choice((1, 9))}
    return Lists(ids, counts, kv_len=S, q_len=SQ, unit=unit, queries=queries, **(seen if beside else {}))


def allowed(lists: Lists, b: int, length: int) -> Tensor:
    """Pairs [H, SQ, length] of a sequence of so many keys that lists and what is beside them allow."""
    b, at, found = b % lists.ids.shape[0], torch.arange(length), torch.zeros(H, SQ, length, dtype=torch.bool)
    for h in range(H):
        for q in range(SQ):
            row = h // (H // lists.ids.shape[1]), q // lists.queries
            ids = lists.ids[b][row]
            ids = ids if lists.counts is None else ids[: int(lists.counts[b][row])]
            position = q + length - SQ
            first = ((position + 1) // lists.unit + 1 - lists.tail) * lists.unit if lists.tail else length
            near = (at > position - lists.window) | (at >= first)
            found[h, q] = torch.isin(at // lists.unit, ids) | (at < lists.sinks) | (near & (at <= position))
    return found


def exact(q: Tensor, rows: Tensor, lists: Lists, mods: tuple[Any, Any], **more: Any) -> list[Any]:
    """The formula for each sequence alone: (out, lse). q [B, H, SQ, WIDTH], rows [B, S, 1, WIDTH]."""
    results = []
    for b, length in enumerate(LENGTHS):
        pairs, k = allowed(lists, b, length), rows[b : b + 1, :length].double().transpose(1, 2)
        listed = lambda _, h, q_idx, kv_idx, pairs=pairs: pairs[h, q_idx, kv_idx]  # noqa: E731
        score_mod, mask = mods
        both = listed if mask is None else fa4flex.primitives.mask.as_mask(mask) & listed
        one = q[b : b + 1].double(), k, k[..., :VALUE].clone()
        results.append(reference.attention(*one, score_mod, both, scale=SCALE, **more))
    return results


def latent(cache: Tensor, **more: Any) -> Latent:
    return Latent(cache, VALUE, ROPE, **more)


def in_pages(rows: Tensor, page: int) -> tuple[Tensor, Paging]:
    """A pool of pages in any order, with slots of NaN behind each sequence, or of ones where it has bytes."""
    columns = -(-S // page)
    table = torch.randperm(B * columns + 3)[: B * columns].view(B, columns)
    poison = 255 if rows.dtype == torch.uint8 else torch.nan
    pool = torch.full((B * columns + 3, page, 1, rows.shape[-1]), poison, dtype=rows.dtype)
    for b, length in enumerate(LENGTHS):
        slots = torch.arange(length)
        pool[table[b, slots // page], slots % page] = rows[b, :length]
    return pool, Paging(table, torch.tensor(LENGTHS))


def padded(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[1, USED:] = 255 if rows.dtype == torch.uint8 else torch.nan
    return rows


Arranged = tuple[Tensor, dict[str, Any], bool]


def arranged(name: str, rows: Tensor) -> Arranged:
    """The cache of a call, its other arguments, and whether queries are packed."""
    cu_q = torch.arange(B + 1, dtype=torch.int32) * SQ
    if name == "padded":
        return padded(rows), {"varlen": Varlen(seqused_k=torch.tensor(LENGTHS))}, False
    if name == "packed":
        cu_k = torch.tensor((0, S, S + USED), dtype=torch.int32)
        return torch.cat((rows[0], rows[1, :USED])), {"varlen": Varlen(cu_q, cu_k)}, True
    kind, page = name.split()
    pool, paging = in_pages(rows, int(page))
    if kind == "pages":
        return pool, {"paging": paging}, False
    return pool, {"paging": paging, "varlen": Varlen(cu_q)}, True


ARRANGEMENTS = "padded", "packed", "pages 1", "pages 16", "pages 64", "packed-pages 1", "packed-pages 16"


def attend(attn: fa4flex.Attention, q: Tensor, name: str, rows: Tensor, lists: Lists, **more: Any) -> Any:
    """(out, lse) [B, H, SQ, ...] of a call of an arrangement. more: of Latent."""
    cache, options, packed = arranged(name, rows)
    given = q.transpose(1, 2).flatten(0, 1) if packed else q
    out, lse = attn(given, latent(cache, **more), blocks=lists, return_lse=True, **options)
    if packed:
        out, lse = out.unflatten(0, (B, SQ)).transpose(1, 2), lse.unflatten(1, (B, SQ)).transpose(0, 1)
    return out, lse


def compare(out: Tensor, lse: Tensor, truths: list[Any], error: float = 1e-12) -> None:
    """The worst element is within `error`; rows without keys are zeros."""
    for b, (truth, truth_lse) in enumerate(truths):
        torch.testing.assert_close(out[b : b + 1].double(), truth.detach(), atol=error, rtol=0)
        torch.testing.assert_close(lse[b : b + 1].double(), truth_lse.detach(), atol=error, rtol=0)
        assert not out[b : b + 1][truth_lse == -torch.inf].any()


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Queries [B, H, SQ, WIDTH] and rows [B, S, 1, WIDTH]."""
    return torch.randn(B, H, SQ, WIDTH).to(dtype), torch.randn(B, S, 1, WIDTH).to(dtype)


# --- on a CPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", (False, True), ids=("lists alone", "keys beside"))
@pytest.mark.parametrize("unit", (1, 4, 16, 64))
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement(name: str, unit: int, beside: bool, seed: int) -> None:
    rng = random.Random(seed)
    (q, rows), mods = drawn(), MODS[rng.choice(tuple(MODS))]
    lists, attn = drawn_lists(rng, unit, beside), fa4flex.compile(*mods, scale=SCALE)
    compare(*attend(attn, q, name, rows, lists), exact(q, rows, lists, mods))


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_contiguous_rows(layout: Any, name: str, seed: int) -> None:
    """All sequences have all keys; `lists.map()` is the same call."""
    rng, (q, rows), mods = random.Random(seed), drawn(), MODS[name]
    lists = drawn_lists(rng, rng.choice((1, 4, 16, 64)), rng.random() < 0.5)
    attn = fa4flex.compile(*mods, scale=SCALE, layout=layout)
    given = q if layout == "bhsd" else q.transpose(1, 2)
    used = Varlen(seqused_k=torch.tensor((S, S)))
    for options in ({}, {"varlen": used}):
        out = attn(given, latent(rows), blocks=lists, **options)
        out = out if layout == "bhsd" else out.transpose(1, 2)
        for b in range(B):
            alone = exact(q[[b, b]], rows[[b, b]], _of_entry(lists, b), mods)[0][0]
            torch.testing.assert_close(out[b : b + 1], alone, atol=1e-12, rtol=0)
    of_map = attn(given, latent(rows), blocks=lists.map())
    assert torch.equal(out, of_map if layout == "bhsd" else of_map.transpose(1, 2))


def _of_entry(lists: Lists, b: int) -> Lists:
    return lists if lists.ids.shape[0] == 1 else lists[b]


@pytest.mark.parametrize("name", ("padded", "packed", "pages 1", "pages 16"))
def test_bytes_of_a_format(name: str, seed: int) -> None:
    """Rows are those that the bytes stand for."""
    rng, form = (
        random.Random(seed),
        LatentFormat(((torch.float8_e4m3fn, VALUE, torch.float32, 8), (torch.bfloat16, ROPE))),
    )
    q, (score_mod, mask) = drawn()[0], MODS["alibi, causal"]
    scales = torch.rand(B, S, 1, 2)
    parts = torch.randn(B, S, 1, VALUE).to(torch.float8_e4m3fn), torch.randn(B, S, 1, ROPE).bfloat16()
    stored = torch.cat([x.contiguous().view(torch.uint8) for x in (parts[0], scales, parts[1])], -1)
    lists = drawn_lists(rng, rng.choice((1, 4, 16)), rng.random() < 0.5)
    attn = fa4flex.compile(score_mod, mask, scale=SCALE)
    rows = form.decoded(stored, torch.float64)
    compare(*attend(attn, q, name, stored, lists, format=form), exact(q, rows, lists, (score_mod, mask)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_other_dtypes(dtype: torch.dtype, seed: int) -> None:
    """The worst element's error is at most twice that of the same maths in PyTorch, on the average of many
    draws, as one's is large by chance."""
    rng, errors = random.Random(seed), []
    for _ in range(16):
        (q, rows), lists = drawn(dtype), drawn_lists(rng, 4, True)
        out, _ = attend(fa4flex.compile(scale=SCALE), q, "padded", rows, lists)
        truths = exact(q, rows, lists, MODS["none"])
        for b, length in enumerate(LENGTHS):
            pairs, k = allowed(lists, b, length), rows[b, :length, 0].expand(H, length, WIDTH)
            same = torch.nn.functional.scaled_dot_product_attention(
                q[b], k, k[..., :VALUE], pairs, scale=SCALE
            )
            some = pairs.any(-1)
            truth = truths[b][0][0]
            errors.append([(x.double() - truth)[some].abs().max().item() for x in (out[b], same)])
    mine, pytorchs = map(sum, zip(*errors, strict=True))
    assert mine <= 2 * pytorchs


@pytest.mark.parametrize("name", ("padded", "packed", "pages 16", "packed-pages 16"))
def test_gradients_reach_queries_and_rows(name: str, seed: int) -> None:
    rng, (q, rows) = random.Random(seed), drawn()
    lists, mods = drawn_lists(rng, 4, True), MODS["alibi, causal"]
    given = q.requires_grad_(), rows.requires_grad_()
    out, lse = attend(fa4flex.compile(*mods, scale=SCALE), q, name, rows, lists)
    loss = out.sin().sum() + lse[lse > -torch.inf].square().sum()
    wanted = sum(o.sin().sum() + n[n > -torch.inf].square().sum() for o, n in exact(q, rows, lists, mods))
    for x, y in zip(torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given), strict=True):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=0)


def test_sinks_and_statistics(seed: int) -> None:
    rng, (q, rows), sinks = random.Random(seed), drawn(), torch.randn(H).double()
    lists, statistics = drawn_lists(rng, 4, True), {}  # of the last sequence
    attn = fa4flex.compile(sinks=sinks, scale=SCALE)
    names = "lse", "max_scores", "entropy"
    cache, options, _ = arranged("pages 16", rows)
    out, aux = attn(q, latent(cache), blocks=lists, return_aux=names, **options)
    truths = exact(q, rows, lists, MODS["none"], sinks=sinks, statistics=statistics)
    for b, (truth, lse) in enumerate(truths):
        torch.testing.assert_close(out[b : b + 1], truth, atol=1e-12, rtol=0)
        torch.testing.assert_close(aux.lse[b : b + 1], lse, atol=1e-12, rtol=0)
    for name in names[1:]:
        torch.testing.assert_close(getattr(aux, name)[1:], statistics[name], atol=1e-11, rtol=0)


# --- on a GPU without a kernel for it -----------------------------------------------------------------------


@pytest.mark.parametrize("unit", (1, 16))
def test_short_units_are_refused_in_words(unit: int) -> None:
    q, rows = torch.randn(1, 2, 1, 576).bfloat16(), torch.randn(1, 96, 1, 576).bfloat16()
    lists = Lists(torch.zeros(1, 1, 1, 3, dtype=torch.int32), kv_len=96, unit=unit)
    with ptxsim.device("sm_100a"), pytest.raises(UnsupportedError, match=rf"lists of units of {unit} keys"):
        fa4flex.compile(scale=SCALE)(q, Latent(rows), blocks=lists)


@pytest.mark.parametrize("page", (0, 16))
def test_long_units_are_a_map(page: int) -> None:
    """PyTorch operations compute it on a chip without a kernel."""
    q, rows = torch.randn(1, 2, 2, 576).bfloat16(), torch.randn(1, 192, 1, 576).bfloat16()
    lists = Lists(torch.tensor([[[[2, 0]]]]), kv_len=192, q_len=2, unit=64, queries=2, window=3)
    attn = fa4flex.compile(scale=192**-0.5)
    options: dict[str, Any] = {}
    if page:
        options["paging"] = Paging(torch.arange(192 // page)[None], torch.tensor([192]))
    shape = (-1, page, 1, 576) if page else rows.shape
    with torch.no_grad(), ptxsim.device("sm_100a"):
        out = attn(q, Latent(rows.view(shape)), blocks=lists, **options)
    truth = attn(q.double(), Latent(rows.double().view(shape)), blocks=lists, **options)
    assert (out.double() - truth).abs().max() <= 2 * 2**-8 * truth.abs().max()


REFUSED: tuple[tuple[Callable[[Tensor, Latent, Lists], Any], str], ...] = (
    (lambda q, rows, lists: fa4flex.attention(q, rows, blocks=lists), "without a scale"),
    (
        lambda q, rows, lists: fa4flex.attention(q, rows, rows.cache, blocks=lists, scale=1.0),
        "v beside Latent",
    ),
    (
        lambda q, rows, lists: fa4flex.compile(scale=1.0)(
            q, rows, blocks=lists, kv_scales=fa4flex.KVScales()
        ),
        "kv_scales= beside Latent",
    ),
    (lambda q, rows, lists: fa4flex.attention(q[..., :8], rows, blocks=lists, scale=1.0), "q of 8 columns"),
    (lambda q, rows, lists: fa4flex.attention(q.float(), rows, blocks=lists, scale=1.0), "mixed dtypes"),
    (lambda q, rows, lists: fa4flex.attention(q[:, :, :2], rows, blocks=lists, scale=1.0), "got q_len=2"),
)


def test_what_does_not_fit() -> None:
    q, rows = drawn()
    lists = Lists(torch.zeros(1, 1, SQ, 2, dtype=torch.int32), kv_len=S)
    for call, told in REFUSED:
        with pytest.raises((fa4flex.InputError, UnsupportedError), match=told):
            call(q, latent(rows), lists)
