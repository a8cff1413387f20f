"""Tiles of keys that kernels on simulated GPUs leave out: within the bound, under all timings, with what is
left out not computed."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from skip_cases import KINDS
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Paging, Precision, Varlen, reference
from fa4flex.variants import causal
from ptxsim.run.counts import by_warp

TIMINGS = (("eager", 0), ("late", 1), ("random", 2), ("random", 3))
HEADS, KV_HEADS, KEYS, WIDTH = 2, 1, 500, 64
SKIP = 0.25
MANY = 130
"""Queries of a call that kernels for many rows take."""
TABLE = torch.zeros(HEADS, MANY, KEYS)
"""Scores besides q.k: the kernels read it, tests write it."""
KEPT = torch.ones(MANY, KEYS, dtype=torch.bool)
"""A mask that is no union of key intervals."""


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, q_idx, kv_idx]


def kept(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return KEPT[q_idx, kv_idx]


MASKS = {"none": None, "causal": causal, "tables": kept}


def compiled(mask: str, skip: float = SKIP, **more: Any) -> fa4flex.Attention:
    return fa4flex.compile(biased, MASKS[mask], precision=Precision(skip=skip), **more)


def written(kind: str, draw: random.Random, rows: int = MANY) -> None:
    """Scores of a kind; masked pairs of KEPT at random, whole tiles among them."""
    TABLE.zero_()
    for h in range(HEADS):
        TABLE[h, :rows] = KINDS[kind](draw, rows, KEYS)
    KEPT.copy_(torch.rand(MANY, KEYS) < 0.8)
    start = draw.randrange(KEYS)
    KEPT[:, start : start + draw.randint(1, 300)] = False
    KEPT[draw.randrange(MANY)] = False


def drawn(rows: int, draw: random.Random) -> list[Tensor]:
    q, k, v = (torch.randn(1, h, n, WIDTH) for h, n in ((HEADS, rows), (KV_HEADS, KEYS), (KV_HEADS, KEYS)))
    if draw.random() < 0.5:
        v = v.sign()
    return [x.bfloat16() for x in (q * 0.2, k, v)]


def within(
    results: tuple[Tensor, Tensor], qkv: list[Tensor], mask: str, sinks: Tensor | None = None
) -> Tensor:
    """The outputs' errors, which keep the bound, and twice the rounding of PyTorch at their dtype besides."""
    q, k, v = qkv
    out, lse = results
    exact, exact_lse = reference.attention(q, k, v, biased, MASKS[mask], sinks=sinks)
    allowed = reference.allowed_pairs(MASKS[mask], (*q.shape[:3], k.shape[2]))
    bound = reference.skip_bound(SKIP, v, allowed, sinks is not None)
    scores = (q.float() @ k.float().mT.expand(-1, HEADS, -1, -1)) / WIDTH**0.5 + TABLE[:, : q.shape[2]]
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
    plain = ((p.bfloat16() @ v.expand(-1, HEADS, -1, -1)).double() - exact).abs().max()
    error = (out.double() - exact).abs()
    assert not out.isnan().any()
    assert bool((error <= bound + 2 * plain + 1e-6).all()), (error - bound).max()
    some = exact_lse > -math.inf
    assert torch.equal(lse > -math.inf, some)
    below, size = (exact_lse - lse)[some], 1e-4 * (1 + exact_lse[some].abs())
    assert bool((below >= -size).all()) and bool((below <= -math.log1p(-SKIP) + size).all())
    return error


def executed(gpu: Any) -> Counter[str]:
    """Instructions by category, and traffic, of all kernels of a call."""
    return sum((count for x in gpu.results for count in (*by_warp(x).values(), x.traffic)), Counter())


def attend(chip: str, attn: fa4flex.Attention, qkv: list[Tensor], timing: Any, **more: Any) -> Any:
    with torch.no_grad(), ptxsim.device(chip, timing[1], timing[0], 2) as gpu:
        results = attn(*qkv, return_lse=True, **more)
    assert not gpu.findings, f"{timing}: {gpu.report()}"
    return results, executed(gpu)


CHIPS = ("sm_90a", "sm_100a")
SHARES = {"special functions": 0.85, "MMA multiply-adds": 0.9, "TMA bytes in": 0.8}
LEFT_OUT: dict[tuple[str, str], set[str]] = {
    ("sm_90a", "many"): {"special functions", "MMA multiply-adds"},
    ("sm_90a", "few"): {"special functions", "MMA multiply-adds", "TMA bytes in"},
    ("sm_100a", "many"): {"special functions"},
    ("sm_100a", "few"): set(),
}
"""Shares: less than these of it where tiles are left out."""
ROWS = {"many": MANY, "few": 3}


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("chip", CHIPS)
def test_random_scores_keep_the_bound(chip: str, rows: str, mask: str, seed: int) -> None:
    draw, attn = random.Random(seed), compiled(mask)
    for kind, timing in zip([*KINDS, "steps"], TIMINGS * 2, strict=True):
        written(kind, draw, ROWS[rows])
        qkv = drawn(ROWS[rows], draw)
        within(attend(chip, attn, qkv, timing)[0], qkv, mask)


@pytest.mark.slow
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_left_out_is_not_computed(chip: str, rows: str, timing: Any, seed: int) -> None:
    """Flat scores leave out nothing, those that fall towards far keys most tiles: with values of one sign
    near and of the other far away, outputs show it."""
    attn, draw, n = compiled("causal"), random.Random(seed), ROWS[rows]
    qkv = drawn(n, draw)
    qkv[2] = torch.where(torch.arange(KEYS) < KEYS - n - 128, -1.0, 1.0).view(1, 1, -1, 1).expand_as(qkv[2])
    qkv[2] = qkv[2].bfloat16()
    TABLE.zero_()
    flat, all_of_it = attend(chip, attn, qkv, timing)
    plain, _ = attend(chip, compiled("causal", 0.0), qkv, timing)
    torch.testing.assert_close(flat, plain, atol=1e-2, rtol=1e-2)
    TABLE[:, :n] = torch.where(torch.arange(KEYS) < KEYS - n - 128, -8.5, 0.0)
    local, some = attend(chip, attn, qkv, timing)
    within(local, qkv, "causal")
    left_out = {what for what, share in SHARES.items() if some[what] < share * all_of_it[what]}
    assert left_out == LEFT_OUT[chip, rows]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("chip", CHIPS)
def test_a_row_that_has_seen_no_key_takes_low_scores(chip: str, rows: str, seed: int) -> None:
    """Rows whose first tiles are masked, and whose scores are far below 0: nothing is below nothing."""
    attn, draw, n = compiled("tables"), random.Random(seed), ROWS[rows]
    written("normal", draw, n)
    TABLE[:, :n] -= 300.0
    KEPT.fill_(True)
    KEPT[::2, 128:] = False
    KEPT[1::2, :384] = False
    qkv = drawn(n, draw)
    within(attend(chip, attn, qkv, ("late", 1))[0], qkv, "tables")


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("chip", CHIPS)
def test_nan_is_not_left_out(chip: str, rows: str, seed: int) -> None:
    attn, draw, n = compiled("none"), random.Random(seed), ROWS[rows]
    written("local", draw, n)
    TABLE[:, :n] = -torch.arange(KEYS - 1, -1, -1.0)
    TABLE[0, n - 1, 3] = math.nan
    (out, _), _ = attend(chip, attn, drawn(n, draw), ("eager", 0))
    assert bool(out[0, 0, n - 1].isnan().all()) and not out[0, 1].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["packed", "padded", "paged", "sinks"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("chip", CHIPS)
def test_ragged_batches_pages_and_sinks(chip: str, rows: str, how: str, seed: int) -> None:
    draw, n, more = random.Random(seed), ROWS[rows], {}
    qkv = drawn(n, draw)
    sinks = torch.tensor([1.0, -2.0]) if how == "sinks" else None
    attn = compiled("causal", sinks=sinks)
    written("local", draw, n)
    q, k, v = given = qkv
    if how == "packed":
        starts = [torch.tensor([0, x], dtype=torch.int32) for x in (n, KEYS)]
        more = {"varlen": Varlen(*starts)}
        given = [x[0].transpose(0, 1) for x in qkv]
    elif how == "padded":
        used = [torch.tensor([x], dtype=torch.int32) for x in (n, KEYS)]
        more = {"varlen": Varlen(seqused_q=used[0], seqused_k=used[1])}
        given = [q, *(torch.cat([x, torch.full_like(x[:, :, :70], math.nan)], 2) for x in (k, v))]
    elif how == "paged":
        pages = -(-KEYS // 64)
        table = torch.arange(pages, dtype=torch.int32).view(1, -1)
        more = {"paging": Paging(table, torch.tensor([KEYS], dtype=torch.int32))}
        room = torch.full((1, KV_HEADS, pages * 64 - KEYS, WIDTH), math.nan).bfloat16()
        caches = (torch.cat([x, room], 2)[0].transpose(0, 1).unflatten(0, (pages, 64)) for x in (k, v))
        given = [q, *(x.contiguous() for x in caches)]
    (out, lse), _ = attend(chip, attn, given, TIMINGS[draw.randrange(4)], **more)
    if how == "packed":
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    within((out, lse), qkv, "causal", sinks)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_parts_of_the_keys_leave_out_their_shares(chip: str, seed: int) -> None:
    """Blocks that share a sequence's keys leave out of their own sums; the whole keeps the bound."""
    draw = random.Random(seed)
    attn = compiled("none", schedule=fa4flex.Schedule(split=256))
    for kind, timing in zip(("local", "sinks", "steps", "normal"), TIMINGS, strict=True):
        written(kind, draw, 3)
        qkv = drawn(3, draw)
        within(attend(chip, attn, qkv, timing)[0], qkv, "none")
