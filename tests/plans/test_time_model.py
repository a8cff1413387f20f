"""The model of a launch's time: beside list scheduling and counting, and the choices that are made by it."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from checked_plans import sizes_of

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.bwd_sm90.cost import backward_units
from fa4flex.kernels.bwd_sm90.plan import HALF_TILE, LONG_TILE, TILE, HopperBackwardPlan, plan_hopper_backward
from fa4flex.kernels.fwd_sm90.plan import HopperPlan, plan_hopper, time_of
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.candidates import least
from fa4flex.kernels.plan.constants import H200, constants_of
from fa4flex.kernels.plan.groups import Groups
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.kernel_time import Heads, many
from fa4flex.kernels.plan.l2 import sections_of_keys, sections_of_queries
from fa4flex.kernels.plan.model import makespan
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest, Request
from fa4flex.kernels.plan.sizes import CELLS, Sizes
from fa4flex.kernels.plan.target import SM90A
from fa4flex.kernels.plan.walks import Form, by_keys, by_queries
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal, sliding_window

BACKWARD = Problem(128, 128, mask_form="queries", met_alike=True)
MOST_HOST = 50e-6
"""Seconds of a choice that was not made before."""


def seen(q: int, key: int, q_len: int, kv_len: int) -> bool:
    return key <= q + kv_len - q_len


# --- tiles and steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("full", "causal"))
def test_walks_are_what_is_counted_pair_by_pair(form: Form, seed: int) -> None:
    """One by one, for up to 16 tiles of a head."""
    draw = random.Random(seed)
    for _ in range(40):
        q_len, kv_len = draw.randint(1, 60), draw.randint(1, 60)
        rows, keys = draw.choice(((4, 4), (6, 4), (5, 8), (8, 5)))
        tiles = [range(first, min(first + rows, q_len)) for first in range(0, q_len, rows)]
        blocks = [range(first, min(first + keys, kv_len)) for first in range(0, kv_len, keys)]
        met = [
            [
                form == "full" or any(seen(q, k, q_len, kv_len) for q in tile for k in block)
                for block in blocks
            ]
            for tile in tiles
        ]
        forward, backward = (walk(form, q_len, kv_len, *size) for walk, size in (
            (by_queries, (rows, keys)), (by_keys, (rows, keys))))  # fmt: skip
        assert (forward.tiles, backward.tiles) == (len(tiles), len(blocks))
        if max(len(tiles), len(blocks)) <= 16:
            assert forward.steps == backward.steps == sum(map(sum, met)), (form, q_len, kv_len, rows, keys)
            assert forward.longest == max(map(sum, met))
            assert backward.longest == max(sum(row[i] for row in met) for i in range(len(blocks)))


def test_long_walks_are_nearly_what_is_counted(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        length, more = draw.randint(3000, 20000), draw.choice((0, 0, 1000))
        rows, keys = draw.choice(((192, 128), (128, 128), (80, 128), (64, 128)))
        q_len, kv_len = length, length + more
        steps = sum(
            -(-min(more + min(first + rows, q_len), kv_len) // keys) for first in range(0, q_len, rows)
        )
        assert by_queries("causal", q_len, kv_len, rows, keys).steps == pytest.approx(steps, rel=0.01)
        most = -(-q_len // rows)
        steps = sum(most - max(first - more, 0) // rows for first in range(0, kv_len, keys))
        assert by_keys("causal", q_len, kv_len, rows, keys).steps == pytest.approx(steps, rel=0.01)


# --- when the last tile ends --------------------------------------------------------------------------------


def scheduled(lengths: list[float], workers: int) -> float:
    """List scheduling: who is done takes the next tile."""
    ends = [0.0] * workers
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def test_launches_end_when_list_scheduling_does(seed: int) -> None:
    """Causal tiles come in sections, longest first, one after the other; equal ones end to the bit."""
    draw, workers = random.Random(seed), 132
    errors = []
    for _ in range(150):
        tiles, width, sections = draw.randint(8, 64), draw.randint(1, 24), draw.randint(1, 12)
        lengths = [float(i) for i in range(tiles, 0, -1) for _ in range(width)] * sections
        found = makespan(len(lengths), sum(lengths), tiles, workers, sections, even=False)
        errors.append(found / scheduled(lengths, workers) - 1)
        count = draw.randint(1, 2000)
        assert makespan(count, 3.0 * count, 3.0, workers, 1, even=True) == scheduled([3.0] * count, workers)
    ordered = sorted(map(abs, errors))
    assert ordered[-8] < 0.15 and sum(ordered) / len(ordered) < 0.05, ordered


def test_sections_are_those_of_the_kernels() -> None:
    """Counted by hand: 28:4 heads of 4,096 and 128 columns have 29 MB of queries and sums for each head of
    keys, four of which are four sections. 512 keys of 128 columns are 256 KB: 8 MB hold 32, and 49 pairs have
    198 tiles, so that 512 are halved to 32. Of 4,096 keys, 16 MB hold 8."""
    assert sections_of_queries(4, 4096 * 1024 * 7) == 4
    assert sections_of_queries(28, 4096 * 1024) == 4
    assert sections_of_keys(512, 512, 512, 4, 198) == 16
    assert sections_of_keys(64, 4096, 512, 32, 198) == 8


# --- what takes longer --------------------------------------------------------------------------------------


def backward_plan(tile: tuple[int, int], problem: Problem = BACKWARD) -> HopperBackwardPlan:
    return replace(plan_hopper_backward(Request(Facts(), problem, SM90A, sizes=sizes_of())), tile=tile)


def test_more_work_never_takes_less(seed: int) -> None:
    draw = random.Random(seed)
    for tile in (LONG_TILE, TILE, HALF_TILE):
        model = backward_plan(tile).time
        for form in ("full", "causal"):
            one = replace(model, form=form)
            size = Heads(draw.randint(1, 20), 8, 8, draw.randint(64, 4000), draw.randint(64, 4000))
            more = size._replace(batch=size.batch + draw.randint(1, 5))
            # A section more or less, and tiles that end together, may shift the end by a tile.
            assert one.predict(more).seconds > 0.9 * one.predict(size).seconds
            doubled = size._replace(batch=4 * size.batch)
            assert one.predict(doubled).seconds > one.predict(size).seconds


def test_a_tile_more_than_a_wave_takes_another_one() -> None:
    waves = [makespan(n, 2.0 * n, 2.0, 132, 1, even=True) for n in (1, 132, 133, 264, 265)]
    assert waves == [2.0, 2.0, 4.0, 4.0, 6.0]


def test_operands_are_those_that_the_simulator_counted() -> None:
    """Clocks of shared memory that operands take per 64 x 64 pairs, by the table of
    docs/notes/backward_sm90.md; dS, dQ, Q and dO take the rest."""
    counted = {(128, LONG_TILE): 947, (192, (64, 64)): 2112}
    for (width, tile), clocks in counted.items():
        plan = replace(
            backward_plan(tile, replace(BACKWARD, head_dim=width, head_dim_v=width)), tile=tile, ctas=1
        )
        config = replace(plan.config(), split="keys" if width == 128 else "columns")
        m, n = tile
        moved = 4 * m * width + 2 * m * 2 * width + 4 * m * width + 2 * m * n * (1 if width == 128 else 2)
        shared = backward_units(config, SM90A).shared - moved / 128
        assert shared * 64 * 64 / (m * n) == pytest.approx(clocks, rel=0.01)


# --- choices ------------------------------------------------------------------------------------------------


def test_the_least_is_taken_and_the_first_of_those_that_take_about_as_long() -> None:
    seconds = [1.0, 0.97, 0.90]
    assert least(seconds, 0.0) == least(seconds, 0.02) == 2
    assert least(seconds, 0.08) == 1 and least(seconds, 0.2) == 0


def test_steps_are_those_of_the_least_prediction() -> None:
    chosen = set()
    for q_len in CELLS:
        sizes = sizes_of(q_len, heads=64)
        plan = plan_hopper_backward(Request(Facts(), BACKWARD, SM90A, sizes=sizes))
        ways = {
            tile: replace(plan, tile=tile).time.predict(many(64, 1, q_len)).seconds
            for tile in (LONG_TILE, TILE)
        }
        first = ways[LONG_TILE] * (1 - H200.backward.error) <= min(ways.values())
        assert plan.tile == (LONG_TILE if first else TILE), (q_len, ways)
        chosen.add(plan.tile)
    assert chosen == {LONG_TILE, TILE}


FEW_STEPS = {
    (32, 16, 16, 512): (384, 364),
    (16, 16, 16, 1024): (471, 456),
    (8, 32, 8, 2048): (1439, 1447),
    (1, 16, 1, 8192): (1081, 1164),
}
"""Batch, query heads, KV heads and length of causal passes, and microseconds in steps of 80 and of 64
queries: the table of docs/notes/backward_sm90.md."""


@pytest.mark.parametrize("size", FEW_STEPS)
def test_steps_take_as_long_as_measured(size: tuple[int, int, int, int]) -> None:
    batch, heads, kv_heads, length = size
    call = Heads(batch, heads, kv_heads, length, length)
    parts = (1,) if heads == kv_heads else (1, 2, 4, 8, 16)
    for tile, measured in zip((LONG_TILE, TILE), FEW_STEPS[size], strict=True):
        model = replace(backward_plan(tile).time, clears=length > 1024)
        found = min(model.predict(call, n).seconds for n in parts if heads // kv_heads % n == 0)
        assert found * 1e6 == pytest.approx(measured, rel=0.1)


# --- forward ------------------------------------------------------------------------------------------------


def forward_request(
    q_len: int, mask: Any = causal, schedule: Schedule = Schedule(), batch: int = 64, heads: int = 40
) -> ForwardRequest:
    facts = fa4flex.compile(mask=mask).program.facts
    problem = Problem(64, 64, mask_form="none" if mask is None else "spans")
    shape = Shape(batch, heads, q_len, q_len)
    return ForwardRequest(facts, problem, SM90A, schedule, Sizes(Inputs(shape, heads, 64, 64)))


def forward_plan(*given: Any, **options: Any) -> HopperPlan:
    return plan_hopper(forward_request(*given, **options))


def test_narrow_heads_have_tiles_that_few_rows_of_are_past_the_end() -> None:
    """635 causal queries are 15 steps of 192 rows, or as many of 128; 576 are whole tiles of 192."""
    tiles = {n: forward_plan(n).tile[0] for n in (128, 192, 256, 576, 635, 4096)}
    assert tiles == {128: 128, 192: 128, 256: 128, 576: 192, 635: 128, 4096: 192}
    assert forward_plan(1000, batch=1, heads=8).tile == (128, 128)  # 64 tiles, each with a multiprocessor
    assert forward_plan(635).form == "causal" and forward_plan(635, sliding_window(100)).form == "other"


def test_a_schedule_leaves_one_candidate() -> None:
    free, asked = forward_plan(635), forward_plan(635, schedule=Schedule(tile=(192, 128)))
    assert set(free.others) == {(192, 128), (128, 128)}
    assert asked.others == ((192, 128),) and asked.tile == (192, 128)


# --- the calls that a choice serves -------------------------------------------------------------------------


def test_choices_are_the_same_within_the_sizes_that_they_serve(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        q_len, batch = draw.randint(65, 6000), draw.choice((1, 2, 64))
        request = forward_request(q_len, draw.choice((causal, sliding_window(99))), batch=batch)
        plan, valid = plan_hopper(request), request.sizes.valid
        assert valid.holds((batch, q_len, q_len))
        for _ in range(5):
            least_q, most_q = max(valid.least[1], 1), min(valid.most[1], 9000)
            other = draw.choice((least_q, most_q, draw.randint(least_q, most_q)))
            b = draw.choice([n for n in (1, 2, 5, 64) if valid.least[0] <= n <= valid.most[0]])
            again = replace(request, sizes=Sizes(Inputs(Shape(b, 40, other, 7), 40, 64, 64)))
            assert plan_hopper(again) == plan, (q_len, other)


def test_few_launches_serve_all_lengths() -> None:
    """Ranges of queries that plans are valid for: narrow heads, whose tiles differ in rows, have most."""
    for mask, most in ((causal, 5), (sliding_window(99), 3)):
        ranges = set()
        for q_len in range(65, 5000, 16):
            request = forward_request(q_len, mask)
            plan_hopper(request)
            ranges.add(request.sizes.valid)
        assert len(ranges) <= most


def grouped_plan(problem: Problem = BACKWARD) -> HopperBackwardPlan:
    return plan_hopper_backward(Request(Facts(), replace(problem, grouped=True), SM90A, sizes=sizes_of()))


def test_parts_are_the_least_of_all_candidates(seed: int) -> None:
    """No number is left out that would take less, though not all are asked for."""
    draw = random.Random(seed)
    for problem in (BACKWARD, Problem(128, 128, mask_form="none")):
        plan = grouped_plan(problem)
        for _ in range(60):
            groups = Groups(draw.choice((2, 7, 8, 16, 48)), draw.choice((1, 4)), plan.time)
            call = draw.choice((1, 3, 64)), draw.randint(1, 3000), draw.randint(1, 3000)
            ways = groups.candidates(*call)
            assert groups.parts(*call) == ways[least([one.seconds for one in ways], H200.backward.error)].what


@pytest.mark.parametrize("group", (4, 16), ids=lambda group: f"group of {group}")
def test_a_choice_takes_microseconds(group: int) -> None:
    """The sizes were not asked about before; least of runs' medians, as other processes run, too. 16 query
    heads can be taken in five numbers of parts."""
    plan = grouped_plan()

    def median(first: int) -> float:
        groups, taken = Groups(group, 8, plan.time), []
        for n in range(first, first + 200):
            start = time.perf_counter()
            groups.parts(3, n, n)
            taken.append(time.perf_counter() - start)
        return sorted(taken)[len(taken) // 2]

    assert min(map(median, range(1000, 4000, 500))) < MOST_HOST


# --- words --------------------------------------------------------------------------------------------------


def test_explanations_list_candidates_and_what_they_would_take() -> None:
    plan = forward_plan(635)
    text = plan.explain(Size(64, 40, 635, 635))
    lines = [line.strip() for line in text.splitlines() if " us, " in line and "clocks" in line]
    assert len(lines) == 2 and [line.endswith("taken") for line in lines].count(True) == 1
    assert next(line for line in lines if line.endswith("taken")).startswith("128 queries x 128 keys")
    call = Heads(64, 40, 40, 635, 635)
    units = time_of(plan.tiles, plan.problem, plan.work, plan.target, plan.form, 1)
    assert f"{units.predict(call).seconds * 1e6:.1f} us" in text and H200.origin in text
    assert "candidates" not in plan.explain()


def test_explanations_of_groups_list_their_parts() -> None:
    attend = fa4flex.compile(mask=causal)
    text = attend.explain(
        4096, batch=4, heads=28, kv_heads=4, head_dim=128, direction="backward", arch="sm_90a"
    )
    assert "7 parts of a group" in text and "all heads of a group" in text and text.count(", taken") == 2


def test_chips_that_were_not_measured_say_so() -> None:
    h100 = SM90A.named("NVIDIA H100 80GB HBM3")
    assert constants_of(SM90A) is H200 and h100.chip == "H100"
    found = constants_of(h100)
    assert "scaled" in found.origin and found.memory == pytest.approx(H200.memory * 3.35 / 4.8)
    fewer = constants_of(SM90A.leaving(32))
    assert fewer.l2 == pytest.approx(H200.l2 * 132 / 100) and fewer.clock == H200.clock
    text = replace(forward_plan(635), target=h100).explain(Size(64, 40, 635, 635))
    assert found.origin in text
