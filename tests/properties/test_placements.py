"""Random masks on random numbers of ranks: every needed key arrives, nothing else moves, no query is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_zoo import dense
from test_compositions import BATCH, HEADS, LONGEST, MASKS
from torch import Tensor

import fa4flex
from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.build import build
from fa4flex.parallel.exchange import Exchange, exchange, tokens
from fa4flex.parallel.placement import UNEVEN, Placement, Ranges, contiguous, joined, place
from fa4flex.parallel.plan import Layout, placed
from fa4flex.parallel.splits import divided
from fa4flex.parallel.work import Work, chunk_for, work_of
from fa4flex.primitives.mask import Mask
from fa4flex.variant import Variant
from fa4flex.variants import (
    bigbird,
    block_diffusion,
    causal,
    checkerboard,
    chunked_local,
    dilated_window,
    document,
    global_window,
    natten,
    prefix_lm,
    shared_prefix,
    sliding_tile,
    sliding_window,
    streaming_llm,
    symmetric_window,
    tree,
    vision_cross,
)


def places(ranges: Ranges, total: int) -> Tensor:
    """bool [total]: tokens in the ranges, each once."""
    count = torch.zeros(total, dtype=torch.int64)
    for lo, hi in ranges:
        assert 0 <= lo < hi <= total
        count[lo:hi] += 1
    assert count.max() <= 1 if total else True
    return count > 0


def owned_once(of_ranks: tuple[Ranges, ...], total: int) -> None:
    together = torch.stack([places(own, total) for own in of_ranks]).sum(0)
    assert (together == 1).all()


def by_chunk(pairs: Tensor, chunk: int) -> Tensor:
    """bool [query chunks, key chunks] from bool [queries, keys]: whether there is some pair."""
    pad = (0, -pairs.shape[1] % chunk, 0, -pairs.shape[0] % chunk)
    padded = torch.nn.functional.pad(pairs, pad)
    return padded.unflatten(1, (-1, chunk)).unflatten(0, (-1, chunk)).any(3).any(1)


def check(pairs: Tensor, work: Work, placement: Placement, found: Exchange, held: tuple[Ranges, ...]) -> None:
    q_len, kv_len = pairs.shape
    owned_once(placement.queries, q_len)
    owned_once(placement.keys, kv_len)
    counts = [tokens(own) for own in placement.queries]
    if placement.kind != "head-tail":  # of which ranks have two pieces
        assert max(counts) - min(counts) <= 2 * work.chunk * max(1, len(work.area) // (2 * len(counts)))
    assert torch.equal(by_chunk(pairs, work.chunk), work.sees)
    for rectangles in (found.rectangles, found.backward):
        check_rectangles(pairs, work, placement, replace(found, rectangles=rectangles), held)


def check_rectangles(
    pairs: Tensor, work: Work, placement: Placement, found: Exchange, held: tuple[Ranges, ...]
) -> None:
    q_len, kv_len = pairs.shape
    allowed = work.sees.repeat_interleave(work.chunk, 1)[:, :kv_len]
    computed = torch.zeros(q_len, kv_len, dtype=torch.int64)
    for rank in range(placement.ranks):
        covered = covered_by(found, rank, held, (q_len, kv_len))
        queries = places(placement.queries[rank], q_len)
        for owner, guests in enumerate(found.visitors(rank)):
            there = places(guests, q_len)
            assert not (there & ~places(placement.queries[owner], q_len)).any(), "a guest of another owner"
            queries |= there
        assert not covered[~queries].any(), "queries that a rank does not have"
        computed += covered
        # Only keys move that some query of a chunk sees which the rank computes against them.
        arrived = torch.zeros(kv_len, dtype=torch.bool)
        for stage in range(1, len(found.sends) + 1):
            arrived |= places(joined(found.incoming(stage, rank)), kv_len)
        rows = by_chunk(covered > 0, 1)
        used = torch.zeros(kv_len, dtype=torch.bool)
        for chunk in range(len(work.area)):
            mine = rows[chunk * work.chunk : (chunk + 1) * work.chunk].any(0)
            used |= mine & allowed[chunk]
        assert not (arrived & ~used).any(), "a key moves that no query of the receiver's chunks sees"
    assert computed.max() <= 1, "a pair that is computed twice"
    assert (computed >= pairs.long()).all(), "a pair that nobody computes"


def covered_by(found: Exchange, rank: int, held: tuple[Ranges, ...], lengths: tuple[int, int]) -> Tensor:
    """int64 [queries, keys]: how often a rank computes each pair, of keys that are there in time."""
    covered, arrived = torch.zeros(lengths, dtype=torch.int64), torch.zeros(lengths[1], dtype=torch.int64)
    own = places(held[rank], lengths[1])
    for stage, of_ranks in enumerate(found.rectangles):
        if stage:
            come = places(joined(found.incoming(stage, rank)), lengths[1])
            assert not (come & own).any(), "a key moves that is there"
            arrived += come
            for source, keys in enumerate(found.incoming(stage, rank)):
                lacks = places(keys, lengths[1]) & ~places(held[source], lengths[1])
                assert not lacks.any(), "a rank sends keys that it does not have"
        for x in of_ranks[rank]:
            here = own | arrived.bool()
            assert here[slice(*x.keys)].all(), "a rectangle of keys that are not there"
            covered[slice(*x.queries), slice(*x.keys)] += 1
    assert arrived.max() <= 1, "a key arrives twice"
    assert int(arrived.sum()) == found.received[rank]
    return covered


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mask=MASKS,
    lengths=st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST), st.booleans()),
    ranks=st.integers(1, 9),
    tile=st.sampled_from((1, 4, 16)),
    stages=st.integers(1, 3),
    kind=st.sampled_from((None, "contiguous", "head-tail", "min-heap")),
    in_order=st.booleans(),
    guests=st.booleans(),
    spared=st.sampled_from((1, 2048)),
    late=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_random_masks(
    mask: Mask,
    lengths: tuple[int, int, bool],
    ranks: int,
    tile: int,
    stages: int,
    kind: str | None,
    in_order: bool,
    guests: bool,
    spared: int,
    late: float,
) -> None:
    q_len, kv_len = lengths[0], lengths[0] if lengths[2] else lengths[1]
    program = build(Variant(mask=mask))
    shape, captured = Shape(BATCH, HEADS, q_len, kv_len), program.captured()
    pairs = dense(program.facts.mask, shape, captured).flatten(0, 1).any(0)
    chunk = chunk_for(q_len, kv_len, max(8 * ranks, 256), tile)
    work = work_of(program.facts, shape, captured, tile, chunk)
    placement = place(work, ranks, kind)  # type: ignore[arg-type]
    if guests:
        before = placement
        placement = divided(work, ranks, before, always=True)
        assert placement.imbalance <= max(before.imbalance, UNEVEN) + 1e-9
        assert sum(placement.loads) == pytest.approx(float(work.area.sum()))
    held = contiguous(kv_len, ranks) if in_order else placement.keys
    with (
        patch("fa4flex.parallel.exchange.LEAST_SPARED", spared),
        patch("fa4flex.parallel.exchange.LATE", late),
    ):
        found = exchange(work, placement, held, stages)
    check(pairs, work, placement, found, held)
    assert "queries over" in placement.explain()


# --- balance ----------------------------------------------------------------------------------------------

MILLION = 1 << 20


def cuts(count: int) -> Tensor:
    """int64 [count + 1]: ends of documents of a million tokens in all, lengths differing a hundredfold."""
    lengths = (torch.rand(count, generator=torch.Generator().manual_seed(1)) ** 3 + 0.001) * MILLION
    ends = (lengths.cumsum(0) / lengths.sum() * MILLION).long()
    ends[-1] = MILLION
    return torch.nn.functional.pad(ends, (1, 0))


def documents(count: int) -> Tensor:
    return torch.searchsorted(cuts(count)[1:-1], torch.arange(MILLION), right=True).to(torch.int32)


def intervals(count: int) -> Tensor:
    ends = cuts(count)
    return torch.stack((ends[:-1], ends[1:]), 1)


BALANCED: dict[str, Callable[[], Mask | None]] = {
    "everything": lambda: None,
    "causal": causal,
    "documents": lambda: causal & document(documents(300)),
    "shared_prefix": lambda: shared_prefix(cuts(64), torch.arange(64) // 8 * 8),
    "sliding_window": lambda: sliding_window(4096),
    "symmetric_window": lambda: symmetric_window(1024),
    "global_window": lambda: global_window(4096, 64),
    "bigbird": lambda: bigbird(MILLION),
    "tree": lambda: tree([-1, *(i // 2 for i in range(4095))]),
    "prefix_lm": lambda: prefix_lm(100_000),
    "chunked_local": lambda: chunked_local(200_000),
    "streaming_llm": lambda: streaming_llm(4, 4096),
    "block_diffusion": lambda: block_diffusion(MILLION // 2, 32),
    "checkerboard": lambda: checkerboard(64),
    "natten": lambda: natten((64, 128, 128), (9, 17, 17)),
    "sliding_tile": lambda: sliding_tile((64, 128, 128), (24, 24, 24), (8, 8, 8)),
    "dilated_window": lambda: dilated_window(4096, 2),
    "vision_cross": lambda: vision_cross(intervals(64), MILLION // 64),
}

QUERIES = {"tree": 4096}
"""Numbers of queries where they are not as many as keys."""


KINDS = {"causal": "head-tail", "documents": "min-heap", "sliding_window": "contiguous", "tree": "contiguous"}


@pytest.mark.parametrize("name", KINDS)
def test_loads_of_a_million_tokens_differ_by_at_most_3_percent(name: str) -> None:
    for ranks in (8, 64):
        assert balanced(name, ranks).kind == KINDS[name]


def test_a_rank_with_global_tokens_has_fewer_others() -> None:
    """Few queries that see all keys: their rank has fewer others, and no rank many more than its share."""
    area = torch.ones(512, dtype=torch.float64)
    area[0] += 8
    found = place(Work(512, 512, 1, area, torch.eye(512, dtype=torch.bool), 1), 4)
    owned_once(found.queries, 512)
    assert [tokens(own) for own in found.queries] == [122, 130, 130, 130]
    assert found.loads == (130,) * 4
    area[0] += 100  # more than others could have of its rank's tokens
    found = place(Work(512, 512, 1, area, torch.eye(512, dtype=torch.bool), 1), 4)
    assert max(tokens(own) for own in found.queries) <= 1.03 * 128


def test_fewer_queries_than_keys_are_cut_by_their_own_number() -> None:
    program = fa4flex.compile().program
    _, found = placed(program.facts, Shape(1, 1, 4096, MILLION), program.captured(), 8, Layout())
    assert found.imbalance == 0 and found.chunk <= 512


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", (8, 64, 512))
@pytest.mark.parametrize("name", BALANCED)
def test_loads_of_every_mask(name: str, ranks: int) -> None:
    balanced(name, ranks)


def balanced(name: str, ranks: int) -> Placement:
    program = fa4flex.compile(mask=BALANCED[name]()).program
    shape = Shape(1, 1, QUERIES.get(name, MILLION), MILLION)
    work, placement = placed(program.facts, shape, program.captured(), ranks, Layout())
    assert placement.imbalance <= 0.03, placement.explain()
    assert sum(placement.loads) == pytest.approx(float(work.area.sum()))
    return placement
