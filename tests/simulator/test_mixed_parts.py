"""Mixed batches over pages in which blocks share the keys of sequences with few query rows, on the simulated
GPU: parts of a sequence in any batch, merged by whoever ends the last one, or by a second kernel where their
length is given, are right against the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from executed import Compared
from helpers import drawn_timing
from paged_pools import Drawn, Size, compare, drawn
from test_forward_paged import chunks, expected
from test_mixed import CAUSAL, MODS, graph_of_few
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Paging, Schedule, Varlen
from fa4flex.kernels.mixed_sm90.config import LEAST, MOST_SPLIT, WAVES
from fa4flex.kernels.mixed_sm90.plan import MixedPlan
from fa4flex.kernels.mixed_sm90.splitting import MixedSplitting
from fa4flex.kernels.plan.arguments import COUNTERS
from fa4flex.runtime.cuda.launches import ready
from fa4flex.variants import causal, sliding_window

LONG = 1500
"""Keys of a sequence that several blocks share, where there are few multiprocessors."""

TILE = 128


def attend(attn: fa4flex.Attention, given: Drawn, sms: int = 2) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a random timing; nothing may be found."""
    timing, seed = drawn_timing()
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing, sms=sms) as gpu:
        out, lse = given(attn, return_lse=True)
    kernels = [result.kernel for result in gpu.results if "sequences" not in result.kernel]
    fixed = attn.variant.schedule.split is not None
    assert ["combine" in name for name in kernels] == [False, True][: 1 + fixed], kernels
    assert all("mixed_sm90" in name for name in kernels), kernels
    found = [finding for finding in gpu.findings if not expected(finding)]
    assert not found, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def check(attn: fa4flex.Attention, given: Drawn, sms: int = 2) -> None:
    compare(attn, given, *attend(attn, given, sms))


def parts_of(sizes: list[tuple[int, int]], heads: tuple[int, int], sms: int) -> list[int]:
    """Parts of the keys of each sequence of (queries, keys), 0 for one that has many rows, or no query: as
    the kernel counts them."""
    group = heads[0] // heads[1]
    tiles = [(-(-q // TILE), -(-k // TILE), 0 < q * group <= 64) for q, k in sizes]
    few = sum(k for _, k, is_few in tiles if is_few)
    many = sum(q * max(k - q // 2, 1) for q, k, is_few in tiles if not is_few)
    share = max((few * heads[1] + many * heads[0]) // (WAVES * sms) + 1, LEAST)
    return [max(-(-k // share), 1) * is_few for _, k, is_few in tiles]


def test_all_parts_have_room_draw() -> None:
    for _ in range(2000):
        heads, kv_heads = random.choice(((32, 8), (8, 8), (4, 1), (64, 1)))
        sms = random.choice((2, 132))
        most = random.choice((64, 2000, 100_000))
        sizes = [
            (random.choice((0, 1, 1, 2, 9, 64, 500)), random.randint(0, random.choice((most, 64))))
            for _ in range(random.choice((1, 3, 40, 200)))
        ]
        rows = [q * heads // kv_heads for q, _ in sizes]
        parts = parts_of(sizes, (heads, kv_heads), sms)
        assert sum(n > 1 for n in parts) * kv_heads <= MOST_SPLIT
        kept = sum(n * r for n, r in zip(parts, rows) if n > 1) * kv_heads
        splitting = MixedSplitting(TILE, 128, sms)
        tokens = sum(q for q, _ in sizes)
        room = splitting.splits(len(sizes), len(sizes) * kv_heads, most, tokens * heads).floats
        assert kept * 129 <= room, (sizes, sms)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "softcap, sinks" else pytest.mark.exhaustive) for n in MODS]
)
def test_variant_draws(name: str) -> None:
    """A long sequence that decodes beside a chunk, short sequences and empty ones, in any order."""
    sizes = [(1, LONG), (129, random.choice((129, 300))), (1, 0), (0, 64)]
    sizes += [(random.choice((1, 2, 16, 17)), random.choice((1, 64, 130))) for _ in range(2)]
    random.shuffle(sizes)
    sms = random.choice((2, 3))
    assert max(parts_of(sizes, (8, 2), sms)) > 1
    queries, lengths = zip(*sizes)
    given = drawn(Size(heads=8, kv_heads=2, lengths=lengths))
    taken = tuple(n if n == 1 else random.randint(0, n) for n in queries) if random.random() < 0.3 else None
    check(fa4flex.compile(**MODS[name]), chunks(given, queries, taken), sms)


@pytest.mark.exhaustive
@pytest.mark.parametrize("d, dv, page_size", [(128, 128, 16), (96, 64, 24), (128, 64, 256), (64, 64, 1)])
def test_widths(d: int, dv: int, page_size: int) -> None:
    given = drawn(Size(heads=4, kv_heads=1, lengths=(LONG, 300, 900), d=d, dv=dv, page_size=page_size))
    check(CAUSAL, chunks(given, (2, 130, 1)))


def test_changed_lengths_are_split_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors with other contents, as replays of a CUDA graph have them: another sequence is long,
    and another one has many queries. Each launch leaves the counters, which they share, at zero."""
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(ready, "counters", lambda device: counters)
    given = chunks(drawn(Size(heads=4, kv_heads=1, lengths=(LONG, 150, 700))), (1, 70, 2))
    check(CAUSAL, given)
    assert not counters.any()
    table, used = given.paging.page_table, given.paging.seqused_k
    assert used is not None and given.varlen is not None and given.varlen.cu_seqlens_q is not None
    table[1], table[0, :3] = table[0].clone(), table[1, :3].clone()
    used.copy_(torch.tensor([40, LONG - 30, 0]))
    given.varlen.cu_seqlens_q.copy_(torch.tensor([0, 69, 72, 73]))
    with patch.object(fa4flex.runtime.cuda.in_place, "make_ready", side_effect=AssertionError("made anew")):
        check(CAUSAL, given)
    assert not counters.any()


def test_without_room_nothing_is_split() -> None:
    """No call makes room for less than its sequences can need, and a kernel would not write past it."""
    given = chunks(drawn(Size(heads=4, kv_heads=1, lengths=(LONG, 150))), (1, 70))
    with patch.object(MixedSplitting, "floats", lambda *_: 4 * 129):
        check(CAUSAL, given)


@pytest.mark.parametrize("used", [None, (2,)])
def test_a_single_chunk_has_no_second_kernel(used: tuple[int, ...] | None) -> None:
    """Nor memory for parts: it has all tokens; where most of them are not used, and it has few rows, nothing
    is split, which is right."""
    given = chunks(drawn(Size(heads=4, kv_heads=1, lengths=(LONG,))), (70,), used)
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2) as gpu:
        out, lse = given(CAUSAL, return_lse=True)
    assert not any("combine" in result.kernel for result in gpu.results)
    compare(CAUSAL, given, out, lse)


@pytest.mark.slow
def test_fixed_shares_are_the_same_bits_in_any_batch() -> None:
    """The first sequence would be in 2 parts there by the work of all, and in 3 alone."""
    sizes = [(1, LONG), (2, 257), (130, 400)]
    assert (parts_of(sizes, (4, 2), 2)[0], parts_of(sizes[:1], (4, 2), 2)[0]) == (2, 3)
    attn = fa4flex.compile(mask=causal, schedule=Schedule(split=512))
    queries, lengths = zip(*sizes)
    given = chunks(drawn(Size(heads=4, kv_heads=2, lengths=lengths)), queries)
    first, lse = attend(attn, given)
    compare(attn, given, first, lse)
    table, used = given.paging.page_table, given.paging.seqused_k
    assert used is not None
    one = Varlen(torch.tensor([0, 1], dtype=torch.int32))
    alone = replace(given, q=given.q[:1], paging=Paging(table[:1], used[:1]), varlen=one)
    out, _ = attend(attn, alone)
    assert torch.equal(out, first[:1])


def test_what_blocks_do_at_barriers_is_the_graph(launches: Compared) -> None:
    """Parts are tiles like others."""
    given = drawn(Size(heads=4, kv_heads=1, lengths=(LONG, 40, 600)))
    unchecked = patch.object(MixedPlan, "check", lambda plan: None)  # nobody takes the turn
    with patch.object(MixedPlan, "topology", property(graph_of_few)), unchecked:
        check(fa4flex.compile(mask=causal & sliding_window(700)), chunks(given, (1, 2, 3)), sms=3)
    assert launches.launches
