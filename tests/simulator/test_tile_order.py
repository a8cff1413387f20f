"""Ragged batches whose tiles are sorted by their keys give the same results (test_sequences.py has the
order); and tiles of keys by sections of heads."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cutlass
import pytest
import torch
from blackwell import BF16, PACKED, TIMINGS, packed
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, Varlen
from fa4flex.kernels.common import work
from fa4flex.kernels.common.backward import BackwardTileScheduler, in_section, sections_of
from fa4flex.kernels.dispatch import plan_forward
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM100A
from fa4flex.variants import causal, sliding_window

SORTED = Schedule(order="longest_first")


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_the_same_bits_in_another_order(arch: str, form: str) -> None:
    """On Hopper, all consumer warpgroups clear the values past a sequence's end: the simulator calls that a
    race, though all of them write the same zeros."""
    lengths, mask = [300, 0, 17, 140, 129], causal if arch == "sm_90a" else sliding_window(200)
    if form == "packed":
        q, k, v = (torch.randn(sum(lengths), 2, 64).bfloat16() for _ in range(3))
        varlen = Varlen(cumulative(lengths), cumulative(lengths))
    else:
        q, k, v = (torch.randn(5, 2, 300, 64).bfloat16() for _ in range(3))
        used = torch.tensor(lengths, dtype=torch.int32)
        varlen = Varlen(seqused_q=used, seqused_k=used)
    results = []
    for schedule in (Schedule(order="row_major"), SORTED):
        attn = fa4flex.compile(mask=mask, schedule=schedule)
        timing = random.choice(("late", "random"))
        with torch.no_grad(), ptxsim.device(arch, random.randrange(9), timing) as gpu:
            results.append(attn(q, k, v, varlen=varlen, return_lse=True))
        assert all(result.fault is None for result in gpu.results) and (arch == "sm_90a" or not gpu.findings)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("next_tile", ["auto", "launch_control"])
def test_a_sorted_batch_is_right(next_tile: Any) -> None:
    schedule = Schedule(order="longest_first", next_tile=next_tile)
    call = packed(PACKED["alibi causal"], (128, 128), BF16, used=True, schedule=schedule)
    timing, seed = random.choice(TIMINGS)
    print(timing, seed)
    call.run(timing, seed)


@pytest.mark.parametrize("causal", [False, True])
def test_sorting_a_skewed_batch_ends_at_the_least_time(causal: bool) -> None:
    """List scheduling ends within a fiftieth of what any order could take, and never later than unsorted."""
    path = Path(__file__).parents[2] / "benchmarks" / "tile_order.py"
    benchmark = runpy.run_path(str(path))
    for name in benchmark["BATCHES"]:
        plain, by_work = benchmark["row"](name, causal, seeds=4)
        assert by_work <= min(plain, 1.02), name
    plain, by_work = benchmark["row"]("one of 16k last, 60 of 256 to 1k", causal, seeds=4)
    # The last tile of a sequence is taken first: under a causal mask the last ones of a launch are short.
    assert plain < 1.05 if causal else plain > 1.08


def test_only_ragged_batches_are_sorted() -> None:
    facts = fa4flex.compile().prepared.engine.facts
    for lengths, order in (("dense", "longest_first"), ("packed", "by_work"), ("used", "by_work")):
        plan = plan_forward(facts, Problem(64, 64, lengths=lengths), SM100A, SORTED)  # type: ignore[arg-type]
        assert plan.order == order


@cute.jit
def place_all(places: cute.Tensor, tiles: Int32, pairs: Int32, width: Int32) -> None:
    sections = sections_of(tiles, pairs, width)
    for number in cutlass.range(tiles * pairs, unroll=1):
        places[number, 0], places[number, 1] = in_section(number, sections)


@pytest.mark.parametrize(("pairs", "width"), [(1, 1), (7, 1), (7, 7), (12, 4), (11, 4), (3, 2)])
def test_a_section_of_heads_takes_one_tile_of_keys_after_the_other(pairs: int, width: int) -> None:
    tiles = random.randint(1, 40)
    places = torch.full((tiles * pairs, 2), -1, dtype=torch.int32)
    place_all(from_dlpack(places), tiles, pairs, width)
    expected = [
        [pair, tile]
        for first in range(0, pairs, width)
        for tile in range(tiles)
        for pair in range(first, min(first + width, pairs))
    ]
    assert places.tolist() == expected


@cute.jit
def put_packed(found: cute.Tensor, q: cute.Tensor, k: cute.Tensor, ends: cute.Tensor) -> None:
    given = SimpleNamespace(
        q=q, k=k, v=k, cu_seqlens_q=ends, cu_seqlens_k=ends, turns=None, dk_parts=None, tables=None
    )
    config = SimpleNamespace(tile_n=128, masked=False)
    grid = BackwardTileScheduler(config, None, packed_sections=True).grid(given)  # type: ignore[arg-type]
    found[0], found[1] = grid.total, grid.sections.width.divisor


@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "kv_heads", "dim", "width"),
    [
        (16, 16384, 16, 16, 128, 16),  # 1 MiB of queries, output gradients and sums each
        (16, 16384, 64, 64, 128, 32),
        (16, 16384, 128, 128, 64, 64),
        (64, 32768, 32, 8, 128, 8),
        (16, 32768, 32, 8, 128, 4),
        (1, 16384, 16, 16, 128, 2),
        (1, 1 << 20, 4, 4, 128, 1),
    ],
)
def test_heads_of_packed_sequences_go_in_sections(
    sequences: int, tokens: int, heads: int, kv_heads: int, dim: int, width: int
) -> None:
    """Sections have as many KV heads as 32 MiB hold queries of, at the average length: one tile of
    keys of all of them after the other."""
    q, k = (torch.empty(1, 1, dim).bfloat16().expand(tokens, n, dim) for n in (heads, kv_heads))
    found, ends = torch.zeros(2, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32)
    put_packed(*(from_dlpack(x) for x in (found, q, k, ends)))
    assert found.tolist() == [kv_heads * (tokens // 128 + sequences), width]


@cute.jit
def halve(widths: cute.Tensor, pairs: Int32, most: Int32) -> None:
    widths[0] = work.halved(pairs, most)


def test_sections_of_forward_passes_are_of_about_one_width() -> None:
    def width(pairs: int, most: int) -> int:
        widths = torch.zeros(1, dtype=torch.int32)
        halve(from_dlpack(widths), pairs, most)
        return int(widths[0])

    assert [width(*some) for some in ((32, 10), (64, 21), (32, 12), (7, 7), (40, 16))] == [8, 16, 8, 7, 10]
    for _ in range(20):
        pairs, most = random.randint(1, 300), random.randint(1, 400)
        found = width(pairs, most)
        assert min(pairs, -(-most // 2)) <= found <= most
        sections = -(-pairs // found)
        assert sections * found - pairs < sections, "the last one lacks less than one pair per section"
