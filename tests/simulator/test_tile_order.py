"""Ragged batches whose tiles are sorted by their keys: every tile once, the most first, the same results; and
tiles of keys by sections of heads."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import cutlass
import pytest
import torch
from blackwell import BF16, PACKED, TIMINGS, packed
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

import fa4flex
from fa4flex import Schedule, Varlen
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import SM100A
from fa4flex.kernels.common.backward import in_section, sections_of
from fa4flex.kernels.dispatch import plan_forward
from fa4flex.runtime.cuda import tile_order as order_module
from fa4flex.runtime.cuda.call import Call, SequenceLengths
from fa4flex.runtime.cuda.tile_order import TileOrder
from fa4flex.variants import causal, sliding_window

SORTED = Schedule(order="longest_first")
MASKS = {"none": None, "causal": causal, "window": sliding_window(40)}


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def order_of(mask: Any, tile_m: int, lengths: Any, q: Tensor, k: Tensor) -> tuple[TileOrder, Call]:
    program = fa4flex.compile(**({} if mask is None else {"mask": mask})).program
    call = Call(q, k, k, (), None, SequenceLengths(*lengths), program.scalars, 1.0, True, ())
    return TileOrder(program.facts, tile_m, program.scalars), call


def work_of(name: str, tile: int, tile_m: int, q_len: int, kv_len: int) -> int:
    """Keys between the first of a tile's first row and the last of its last row, by the masks' definition."""
    last = min((tile + 1) * tile_m, q_len) - 1
    stop = kv_len if name == "none" else min(max(last + 1 + kv_len - q_len, 0), kv_len)
    start = max(tile * tile_m + kv_len - q_len - 39, 0) if name == "window" else 0
    return max(stop - start, 0)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", ["packed", "packed, used", "padded"])
def test_every_tile_once_and_the_most_keys_first(name: str, form: str) -> None:
    tile_m, batch = random.choice((64, 128, 256)), random.randint(1, 40)
    q_lengths, k_lengths = ([random.choice((0, 1, 100, 128, 257, 900)) for _ in range(batch)] for _ in "qk")
    used = [random.randint(0, n) for n in q_lengths], [random.randint(0, n) for n in k_lengths]
    if form == "padded":
        q, k = (torch.empty(batch, 2, max(n), 8) for n in (q_lengths, k_lengths))
        lengths, seen = (None, None, *(torch.tensor(n) for n in used)), used
    else:
        q, k = (torch.empty(sum(n), 2, 8) for n in (q_lengths, k_lengths))
        limits = tuple(torch.tensor(n) for n in used) if "used" in form else (None, None)
        lengths = (cumulative(q_lengths), cumulative(k_lengths), *limits)
        seen = used if "used" in form else (q_lengths, k_lengths)
    order, call = order_of(MASKS[name], tile_m, lengths, q, k)
    found = order(call)
    real = [(b, tile) for b, tile in found.tolist() if b < batch]
    expected = [(b, tile) for b, n in enumerate(seen[0]) for tile in range(-(-n // tile_m))]
    assert sorted(real) == expected and all(b == batch for b, _ in found.tolist()[len(real) :])
    work = [work_of(name, tile, tile_m, seen[0][b], seen[1][b]) for b, tile in real]
    assert work == sorted(work, reverse=True)
    upper = -(-max(q_lengths) // tile_m) * batch if form == "padded" else sum(q_lengths) // tile_m + batch
    assert found.shape == (upper, 2) and found.dtype == torch.int32 and found.is_contiguous()


def test_an_order_is_kept_for_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is identity and version of the tensors; no order is kept for inference tensors, whose changes
    nobody counts."""
    made: list[int] = []
    compute = TileOrder.compute
    monkeypatch.setattr(TileOrder, "compute", lambda self, call: made.append(1) or compute(self, call))
    cu = cumulative([5, 300, 7])
    order, call = order_of(causal, 128, (cu, cu, None, None), *(torch.empty(312, 1, 8),) * 2)
    first = order(call)
    assert order(call) is first and len(made) == 1
    cu[1:3] = torch.tensor([300, 305])
    assert not torch.equal(order(call), first) and len(made) == 2
    others = [cumulative([n, 312 - n]) for n in range(2 * order_module.MOST_KEPT)]
    for other in others:
        order(call._replace(lengths=SequenceLengths(other, other)))
    assert len(order._kept) == order_module.MOST_KEPT
    with torch.inference_mode():
        cu = cumulative([5, 300, 7])
    before = len(made)
    for _ in range(2):
        order(call._replace(lengths=SequenceLengths(cu, cu)))
    assert len(made) == before + 2


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
        with torch.no_grad(), fa4flex.simulator.device(arch, random.randrange(9), timing) as gpu:
            results.append(attn(q, k, v, varlen=varlen, return_lse=True))
        assert gpu.results[0].fault is None and (arch == "sm_90a" or not gpu.findings)
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
    assert plain > 1.08


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
