"""Random masks on random numbers of ranks: every needed key arrives, nothing else moves, no query is lost."""

from __future__ import annotations

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
from fa4flex.parallel.placement import Placement, Ranges, contiguous, place
from fa4flex.parallel.plan import Layout, placed
from fa4flex.parallel.work import Work, chunk_for, work_of
from fa4flex.primitives.mask import Mask
from fa4flex.variant import Variant
from fa4flex.variants import (
    block_diffusion,
    causal,
    chunked_local,
    dilated_window,
    document,
    natten,
    prefix_lm,
    sliding_tile,
    sliding_window,
    streaming_llm,
    symmetric_window,
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
    needed_chunks = by_chunk(pairs, work.chunk)
    assert torch.equal(needed_chunks, work.sees)
    for rank, own in enumerate(placement.queries):
        rows = places(own, q_len)
        wanted = pairs[rows].any(0)  # exactly what its queries see
        allowed = needed_chunks[by_chunk(rows[:, None], work.chunk).flatten()].any(0)
        allowed = allowed.repeat_interleave(work.chunk)[:kv_len]
        mine = places(held[rank], kv_len)
        arrived = torch.zeros(kv_len, dtype=torch.int64)
        for stage in range(1, len(found.sends) + 1):
            for source, keys in enumerate(found.incoming(stage, rank)):
                there = places(keys, kv_len)
                assert not (there & ~places(held[source], kv_len)).any(), (
                    "a rank sends keys that it does not have"
                )
                assert source != rank or not keys
                arrived += there
        assert arrived.max() <= 1, "a key arrives twice"
        assert not (wanted & ~mine & (arrived == 0)).any(), "a key that a query sees does not arrive"
        assert not ((arrived > 0) & ~allowed).any(), "a key moves that no query of the receiver's chunks sees"
        assert int(arrived.sum()) == found.received[rank]
        covered = torch.zeros(q_len, kv_len, dtype=torch.int64)
        here = mine.clone()
        for stage, of_ranks in enumerate(found.rectangles):
            if stage:
                here = torch.zeros(kv_len, dtype=torch.bool)
                for keys in found.incoming(stage, rank):
                    here |= places(keys, kv_len)
            for x in of_ranks[rank]:
                assert here[slice(*x.keys)].all(), "a rectangle of keys that are not there"
                covered[slice(*x.queries), slice(*x.keys)] += 1
        assert not covered[~rows].any() and covered.max() <= 1
        assert (covered[rows] >= pairs[rows].long()).all(), "a pair that nobody computes"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mask=MASKS,
    lengths=st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST), st.booleans()),
    ranks=st.integers(1, 9),
    tile=st.sampled_from((1, 4, 16)),
    stages=st.integers(1, 3),
    kind=st.sampled_from((None, "contiguous", "head-tail", "min-heap")),
    in_order=st.booleans(),
)
def test_random_masks(
    mask: Mask,
    lengths: tuple[int, int, bool],
    ranks: int,
    tile: int,
    stages: int,
    kind: str | None,
    in_order: bool,
) -> None:
    q_len, kv_len = lengths[0], lengths[0] if lengths[2] else lengths[1]
    program = build(Variant(mask=mask))
    shape, captured = Shape(BATCH, HEADS, q_len, kv_len), program.captured()
    pairs = dense(program.facts.mask, shape, captured).flatten(0, 1).any(0)
    chunk = chunk_for(q_len, kv_len, max(8 * ranks, 256), tile)
    work = work_of(program.facts, shape, captured, tile, chunk)
    placement = place(work, ranks, kind)  # type: ignore[arg-type]
    held = contiguous(kv_len, ranks) if in_order else placement.keys
    check(pairs, work, placement, exchange(work, placement, held, stages), held)
    assert "queries over" in placement.explain()


# --- balance ----------------------------------------------------------------------------------------------

MILLION = 1 << 20


def documents(count: int, length: int) -> Tensor:
    """Documents whose lengths differ a hundredfold and more."""
    lengths = (torch.rand(count, generator=torch.Generator().manual_seed(1)) ** 3 + 0.001) * length
    cuts = (lengths.cumsum(0) / lengths.sum() * length).long()[:-1]
    return torch.searchsorted(cuts, torch.arange(length), right=True).to(torch.int32)


BALANCED = {
    "everything": None,
    "causal": causal(),
    "documents": causal & document(documents(300, MILLION)),
    "sliding_window": sliding_window(4096),
    "symmetric_window": symmetric_window(1024),
    "prefix_lm": prefix_lm(100_000),
    "chunked_local": chunked_local(200_000),
    "streaming_llm": streaming_llm(4, 4096),
    "block_diffusion": block_diffusion(MILLION // 2, 32),
    "natten": natten((64, 128, 128), (9, 17, 17)),
    "sliding_tile": sliding_tile((64, 128, 128), (24, 24, 24), (8, 8, 8)),
    "dilated_window": dilated_window(4096, 2),
}


KINDS = {"causal": "head-tail", "documents": "min-heap", "sliding_window": "contiguous"}


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
    program = fa4flex.compile(mask=BALANCED[name]).program
    work, placement = placed(
        program.facts, Shape(1, 1, MILLION, MILLION), program.captured(), ranks, Layout()
    )
    assert placement.imbalance <= 0.03, placement.explain()
    assert sum(placement.loads) == pytest.approx(float(work.area.sum()))
    return placement
