"""Plans of the Hopper kernel for few query rows: what it accepts, what fits, how keys are split, and its
pipeline in any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from broken_graphs import is_red, with_role
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import InputError
from fa4flex.kernels import dispatch
from fa4flex.kernels.decode_sm90.plan import DECODE_SM90, DecodePlan
from fa4flex.kernels.decode_sm90.topology import decode_topology
from fa4flex.kernels.fwd_sm90 import plan as forward_plan
from fa4flex.kernels.fwd_sm90.plan import FWD_SM90, HopperPlan
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import TOGETHER, in_pages, together
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.splitting import MOST_COMPARED, MOST_SPLITS, Splitting
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule

FACTS = fa4flex.compile().program.facts
FEW = Problem(128, 128)


def planned(problem: Problem, schedule: Schedule = Schedule()) -> DecodePlan:
    plan = plan_forward(FACTS, problem, SM90A, schedule, sizes=sizes_of(64))
    assert isinstance(plan, DecodePlan)
    return plan


# --- which problems -----------------------------------------------------------------------------------


def test_it_takes_few_rows_whose_key_tiles_follow_from_spans() -> None:
    assert dispatch.choose("forward", FEW, SM90A, sizes_of(64)) is DECODE_SM90
    assert dispatch.choose("forward", FEW, SM90A, sizes_of(65)) is FWD_SM90
    for changes in (
        {"mask_form": "tables"},
        {"lengths": "packed"},
        {"statistics": ("lse", "max_scores")},
    ):
        problem = replace(FEW, **changes)  # type: ignore[arg-type]
        assert dispatch.choose("forward", problem, SM90A, sizes_of(64)) is FWD_SM90
    assert dispatch.choose("forward", FEW, SM100A, sizes_of(64)) is not DECODE_SM90


@pytest.mark.parametrize("group, most", [(1, 64), (4, 16), (7, 9), (64, 1)])
def test_rows_are_queries_times_heads_of_a_group(group: int, most: int) -> None:
    """The launch of one call serves others on its side of the limit."""
    for q_len, few in ((most, True), (most + 1, False)):
        reach = valid(Inputs(Shape(2, 2 * group, q_len, 500), 2, 64, 64))
        assert reach.holds((2, q_len, 500)) and not reach.holds((2, most + few, 500))
    assert not valid(Inputs(Shape(1, 65, 1, 500), 1, 64, 64)).holds((1, 0, 500))


def valid(inputs: Inputs) -> Reach:
    sizes = Sizes(inputs)
    plan_forward(Facts(), Problem(64, 64), SM90A, sizes=sizes)
    return sizes.valid


def test_who_asks_for_tiles_gets_the_kernel_that_has_a_choice() -> None:
    for schedule in (Schedule(tile=(64, 64)), Schedule(order="row_major"), Schedule(next_tile="counter")):
        assert isinstance(plan_forward(FACTS, FEW, SM90A, schedule, sizes=sizes_of(64)), HopperPlan)


# --- pages --------------------------------------------------------------------------------------------

PAGED = replace(FEW, lengths="used", keys=in_pages(16))


@pytest.mark.parametrize("d, least", [(128, 8), (64, 16), (96, 8), (80, 8)])
def test_pages_are_read_in_place(d: int, least: int) -> None:
    """Boxes make up a tile, eight at most; the rows of smaller pages are copied by a warpgroup."""
    for rows in TOGETHER:
        plan = planned(replace(PAGED, head_dim=d, head_dim_v=d, keys=in_pages(rows)))
        config, keys = plan.config(), plan.topology.ring("k")
        assert config.box_rows == min(rows, plan.tile_n) and config.paged
        if rows >= least:
            assert config.gather_warps == 0 and config.clears
            assert sum(keys.copies) == keys.transaction_bytes == plan.tile_n * plan.widths[0] * 2
        else:
            assert config.gather_warps == 4 and not config.clears
            assert (keys.copies, keys.transaction_bytes) == ((), 0)
            assert (keys.full_arrivals, keys.lanes) == (4, 32)


def test_page_sizes_have_classes() -> None:
    assert [together(n) for n in (1, 3, 6, 16, 48, 128, 256, 1000)] == [1, 1, 2, 16, 16, 128, 128, 8]


def test_no_other_kernel_takes_pages() -> None:
    wide = replace(PAGED, head_dim=256, head_dim_v=256)
    with pytest.raises(fa4flex.UnsupportedError, match="pages of 16 keys"):
        dispatch.choose("forward", wide, SM100A, sizes_of(5000))
    for schedule in (Schedule(tile=(192, 64)), Schedule(order="longest_first")):
        with pytest.raises(fa4flex.UnsupportedError, match="pages"):
            plan_forward(FACTS, PAGED, SM90A, schedule, sizes=sizes_of(64))


def test_pages_are_explained() -> None:
    assert "read in place; a tile is brought in 4 x 16 keys" in planned(PAGED).explain()
    assert "pages" not in planned(FEW).explain()
    told = many_rows(PAGED).explain()
    assert "read in place; a tile is brought in 8 x 16 keys" in told and "of K and V" in told
    assert "of K, a copy" in many_rows(replace(PAGED, head_dim_v=96)).explain()
    assert "a copy has" not in many_rows(replace(PAGED, keys=in_pages(4))).explain()


def many_rows(problem: Problem, schedule: Schedule = Schedule()) -> HopperPlan:
    plan = plan_forward(FACTS, problem, SM90A, schedule, sizes=sizes_of(65))
    assert isinstance(plan, HopperPlan)
    return plan


@pytest.mark.parametrize(
    "d, dv", [*((d, d) for d in (64, 80, 96, 128, 160, 192, 256)), (192, 128), (64, 128)]
)
def test_many_rows_read_pages_in_place(d: int, dv: int) -> None:
    """Boxes make up tiles, and lie in one page each; two consumers leave the producer its registers. The rows
    of smaller pages are copied by four warps."""
    for rows, lengths in product(TOGETHER, ("used", "packed")):
        problem = replace(PAGED, head_dim=d, head_dim_v=dv, keys=in_pages(rows), lengths=lengths)
        assert forward_plan.accepts(problem, SM90A, sizes_of(65))
        plan = many_rows(problem)
        config = plan.config()
        box, whole = config.boxes.rows, config.boxes.whole
        assert rows % box == 0 and plan.tiles.tile_n % box == 0
        assert config.paged and config.producer_registers >= 40
        copies = {ring.name: ring.copies for ring in plan.topology.rings}
        if plan.tiles.tile_n // box > 16:
            assert config.gathers and config.producers == 4 and plan.tiles.tile_n % 32 == 0
            assert copies["k"] == copies["v"] == () and not any(whole)
            assert plan.topology.ring("k").full_arrivals == 4 and plan.topology.by_warp == ("k", "v")
        else:
            assert not config.gathers and config.producers == 2
            assert sum(copies["v"]) == plan.tiles.tile_n * plan.tiles.head_dim_v * 2
            assert len(copies["k"]) % (plan.tiles.tile_n // box) == 0
            assert whole == tuple(width in (128, 192, 256) and box % 8 == 0 for width in (d, dv))
            for name, width, one in zip(("k", "v"), (d, dv), whole):
                assert (len(copies[name]) == plan.tiles.tile_n // box) == (one or width == 64)


def test_rows_that_tiles_are_wider_than_come_in_blocks() -> None:
    """A tile ends with zeros, where in memory another row follows."""
    for width in (120, 184, 248):
        whole = many_rows(replace(PAGED, head_dim=width, head_dim_v=width)).config().boxes.whole
        assert not any(whole)


def test_a_schedule_has_its_tiles_with_pages() -> None:
    schedules = Schedule(tile=(64, 64)), Schedule(order="row_major"), Schedule(next_tile="counter")
    for schedule in schedules:
        assert many_rows(PAGED, schedule).config().paged
    assert many_rows(PAGED, schedules[0]).tile == (64, 64)
    with pytest.raises(fa4flex.UnsupportedError, match="longest_first"):
        many_rows(PAGED, Schedule(order="longest_first"))


# --- what fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d, dv", [*((d, d) for d in range(8, 257, 8)), (192, 128), (128, 256), (64, 256)])
def test_every_width_has_a_plan_with_two_stages_at_least(d: int, dv: int) -> None:
    for dtype, lengths, sinks in product(("bfloat16", "float16"), ("dense", "used"), (False, True)):
        plan = planned(Problem(d, dv, dtype, dtype, lengths, sinks=sinks))  # type: ignore[arg-type]
        assert plan.kv_stages >= 2 and plan.config().head_dim >= d
        in_flight = plan.blocks * (plan.memory["k"].size + plan.memory["v"].size)
        assert in_flight >= 160 << 10, "less than what a multiprocessor's share of the memory needs"


def test_a_plan_that_does_not_hold_is_refused() -> None:
    plan = planned(FEW)
    for wrong in (
        replace(plan, kv_stages=plan.kv_stages + 1),
        replace(plan, blocks=3),
        replace(plan, registers=replace(plan.registers, consumer=240)),
        replace(plan, tile_n=1024, kv_stages=1, blocks=1),
    ):
        with pytest.raises((PlanError, fa4flex.UnsupportedError)):
            wrong.check()


def test_it_is_explained() -> None:
    text = planned(FEW).explain()
    assert "64 rows, x 64 keys" in text and "2 of them on a multiprocessor" in text and "by shapes" in text
    assert "128 to each" in planned(FEW, Schedule(split=100)).explain()


# --- splits -------------------------------------------------------------------------------------------

H200 = Splitting(64, 128, 132)


def splits(by: Splitting, pairs: int, kv_len: int, each: int = 4) -> int:
    """Splits, at most, of so many pairs of `each` rows, of as many sequences."""
    return by.splits(pairs, pairs, kv_len, each * pairs).most


def test_splits_fill_the_chip_and_no_more() -> None:
    assert splits(H200, 8, 8192) == 16, "one block per multiprocessor"
    assert splits(H200, 128, 8192) == 1 and splits(H200, 512, 8192) == 1, "nothing to merge"
    assert splits(H200, 8, 64) == 1 and splits(H200, 8, 0) == 1, "no more than tiles"
    for pairs, kv_len in product((1, 3, 8, 32, 100, 133, 140, 1000), (1, 100, 8192, 70_000, 1 << 20)):
        tiles = -(-kv_len // 64)
        found = splits(H200, pairs, kv_len)
        assert 1 <= found <= min(tiles, MOST_SPLITS)
        busiest = -(-pairs * found // 132) * -(-tiles // found)
        assert busiest <= max(1.35 * pairs * tiles / 132, 4, tiles / MOST_SPLITS + 1), (pairs, kv_len, found)


def test_sequences_of_different_lengths_have_more_blocks() -> None:
    ragged = replace(H200, uneven=True)
    assert splits(ragged, 512, 32768) > splits(H200, 512, 32768)
    assert splits(ragged, 512, 64) == 1
    assert splits(ragged, 128, 8192) == 4, "parts of 2,048 keys"
    assert splits(ragged, 128, 8192, 64) == 2, "partial outputs of 64 rows are a thirtieth of the keys"
    assert splits(ragged, 8, 65536) == 32 == splits(ragged, 8, 65536, 16)


def test_fixed_parts_do_not_follow_the_batch() -> None:
    fixed = planned(FEW, Schedule(split=1000)).splitting
    assert fixed.share == 16 and splits(fixed, 8, 8192) == 8 == splits(fixed, 1000, 8192)
    assert splits(fixed, 8, 64) == 2, "short sequences are merged as well"
    for wrong in (0, -5, 1.5, True):
        with pytest.raises(InputError, match="split="):
            Schedule(split=wrong)  # type: ignore[arg-type]


def test_even_batches_are_split_as_if_their_lengths_were_known() -> None:
    ragged = replace(H200, uneven=True)
    for batch, kv_len, rows in product((2, 16, 64, 512), (100, 8192, 65536), (4, 64)):
        known, found = (by.splits(batch, 8 * batch, kv_len, rows * batch) for by in (H200, ragged))
        assert known.even == known.most <= found.even <= found.most
        room, pairs = 2 * 132, 8 * batch
        if pairs * found.most <= room or pairs * known.even >= room:
            assert found.even == known.even
        else:
            assert room - pairs < pairs * found.even <= room, "a block for each place that the chip has"
        assert found.floats == (found.most * rows * batch * 129 if found.most > 1 else 0)
    assert ragged.splits(1, 8, 65536, 32) == H200.splits(1, 8, 65536, 32), "a single sequence is even"
    many = ragged.splits(MOST_COMPARED + 1, MOST_COMPARED + 1, 65536, 4)
    assert many.even == many.most > 1, "too many lengths for each warp to read"


def test_windows_are_split_by_the_keys_that_rows_see() -> None:
    ragged = replace(H200, uneven=True)
    for by, pairs, kv_len in product((H200, ragged), (8, 128, 512), (2048, 8192, 65536)):
        assert splits(replace(by, seen=1024), pairs, kv_len) == splits(by, pairs, 18 * 64), (
            "16 tiles, and ends"
        )
        assert splits(replace(by, seen=kv_len), pairs, kv_len) == splits(by, pairs, kv_len)
    assert splits(ragged, 512, 32768) > 1 == splits(replace(ragged, seen=1024), 512, 32768)
    fixed = planned(FEW, Schedule(split=1000)).splitting
    assert splits(replace(fixed, seen=1024), 8, 8192) == splits(fixed, 8, 8192), "as the schedule asks"


def test_memory_of_parts() -> None:
    assert H200.splits(128, 128, 8192, 512).floats == 0
    assert H200.splits(1, 8, 8192, 32) == (16, 16, 16 * 32 * 129)


# --- the pipeline -------------------------------------------------------------------------------------


def sound(clears: bool = True, stages: int = 2, gather_warps: int = 0) -> Topology:
    return decode_topology(128, 64, 64, stages, clears, TileCopies(64, gather_warps))


def test_it_runs_in_any_order(seed: int) -> None:
    for clears, stages, tiles, warps in product((True, False), (1, 2, 3), (1, 2, 7), (0, 4)):
        pipeline = sound(clears, stages, warps)
        check_counts(pipeline)
        for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
            simulate(pipeline, [tiles], pick)


RUNS = ([1], [2], [7])
"""Key tiles of each tile of queries, of runs in which something is left out."""


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits, releases or gatherings, the pipeline fails its checks or some run."""
    needed = "acquire", "wait", "release", "finish", "sync", "load", "fill"
    for pipeline, part in product((sound(False), sound(False, 2, 4)), ("opening", "first", "body")):
        for role in pipeline.roles:
            for i, event in enumerate(getattr(role, part)):
                if event.action in needed:
                    left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                    assert is_red(with_role(pipeline, replace(role, **{part: left})), seed, RUNS), (
                        part,
                        event,
                    )
