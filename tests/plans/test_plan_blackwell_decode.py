"""Plans of the Blackwell kernel for few query rows: what it accepts, what fits, copies of rows, and its
pipeline, proved and broken."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from barrier_counts import counts_of
from blackwell_plans import broken, dropped, edges, ordered, refuses_columns, with_ring, wrong_counts
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels import dispatch
from fa4flex.kernels.decode_sm100.plan import DECODE_SM100, BlackwellDecodePlan
from fa4flex.kernels.decode_sm100.roles import barrier_table
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100, BlackwellPlan
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import TOGETHER, in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM100A, SM103A
from fa4flex.kernels.plan.topology import Event
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace
from fa4flex.primitives.schedule import Schedule

FEW = Problem(128, 128)
PAGED = replace(FEW, lengths="used", keys=in_pages(16))
NARROW = (*((d, d) for d in range(8, 129, 8)), (136, 64), (64, 128), (256, 64))
WIDE = (*((d, d) for d in range(136, 257, 8)), (192, 128), (64, 256), (256, 128), (200, 136))
"""Widths of which a multiprocessor has room for two blocks, and for one."""
TILES = ([1], [2], [3], [9])
"""Key tiles that a block visits; the rings go round more than once."""


@cache
def planned(problem: Problem = FEW, schedule: Schedule = Schedule(), rows: int = 32) -> BlackwellDecodePlan:
    plan = plan_forward(Facts(), problem, SM100A, schedule, sizes=sizes_of(rows))
    assert isinstance(plan, BlackwellDecodePlan)
    return plan


# --- which problems -----------------------------------------------------------------------------------


def test_it_takes_few_rows_whose_key_tiles_follow_from_spans() -> None:
    for target in (SM100A, SM103A):
        assert dispatch.choose("forward", FEW, target, sizes_of(64)) is DECODE_SM100
        assert dispatch.choose("forward", FEW, target, sizes_of(65)) is FWD_SM100
    for changes in (
        {"mask_form": "tables"},
        {"lengths": "packed"},
        {"statistics": ("lse", "max_scores")},
    ):
        problem = replace(FEW, **changes)  # type: ignore[arg-type]
        assert dispatch.choose("forward", problem, SM100A, sizes_of(64)) is FWD_SM100
    for widths in WIDE:
        for problem in (Problem(*widths), Problem(*widths, lengths="used", keys=in_pages(16))):
            assert dispatch.choose("forward", problem, SM100A, sizes_of(64)) is DECODE_SM100


def test_who_asks_for_tiles_gets_the_kernel_that_has_a_choice() -> None:
    for schedule in (Schedule(tile=(128, 128)), Schedule(order="row_major"), Schedule(next_tile="counter")):
        for problem in (FEW, PAGED):
            assert isinstance(
                plan_forward(Facts(), problem, SM100A, schedule, sizes=sizes_of(1)), BlackwellPlan
            )
    with pytest.raises(fa4flex.UnsupportedError, match="keys in pages"):
        plan_forward(Facts(), PAGED, SM100A, Schedule(order="longest_first"), sizes=sizes_of(1))
    for changes in ({"head_dim": 256}, {"head_dim": 96, "keys": in_pages(1)}):
        problem = replace(PAGED, **changes)  # type: ignore[arg-type]
        with pytest.raises(fa4flex.UnsupportedError, match="pages are gathered instead"):
            plan_forward(Facts(), problem, SM100A, Schedule(order="row_major"), sizes=sizes_of(1))


@pytest.mark.parametrize(
    "group, most", [(1, (32, 64)), (4, (8, 16)), (7, (4, 9)), (32, (1, 2)), (64, (0, 1))]
)
def test_kernels_serve_calls_with_as_many_copies(group: int, most: tuple[int, int]) -> None:
    """The launch of one call serves others on its side of both limits, and no more."""
    fewest, few = most
    sides = [range(1, fewest + 1), range(fewest + 1, few + 1), range(few + 1, few + 3)]
    for side in filter(len, sides):
        sizes = Sizes(Inputs(Shape(2, 2 * group, side[0], 500), 2, 64, 64))
        plan_forward(Facts(), Problem(64, 64), SM100A, sizes=sizes)
        for q_len in range(1, few + 3):
            assert sizes.valid.holds((2, q_len, 500)) == (q_len in side), (side, q_len)


def test_copies_fill_the_lanes() -> None:
    """Four of up to 32 rows, two of up to 64: a thread has a quarter, or half, of a tile's scores."""
    for rows, copies in ((32, 4), (33, 2)):
        plan = planned(rows=rows)
        config = plan.config()
        assert (config.copies, config.rows, config.part) == (copies, 128 // copies, 64 // copies)
        assert plan.tile == (config.rows, 64)
    with pytest.raises(PlanError, match="8 copies"):
        replace(planned(), copies=8).check()


# --- what fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d, dv", NARROW + WIDE)
def test_every_width_has_a_plan(d: int, dv: int) -> None:
    for lengths, rows in product(("dense", "used"), (32, 64)):
        plan = planned(Problem(d, dv, lengths=lengths), rows=rows)  # type: ignore[arg-type]
        in_flight = plan.blocks * (plan.memory["k"].size + plan.memory["v"].size)
        assert plan.kv_stages >= 2 and in_flight >= 160 << 10, "memory would wait for the next copy"
        columns = plan.config().memory.allocated
        assert columns * plan.blocks <= 512 and columns & (columns - 1) == 0
    assert plan.blocks == (1 if (d, dv) in WIDE else 2)


def test_a_plan_that_does_not_hold_is_refused() -> None:
    plan = planned()
    for wrong in (
        replace(plan, kv_stages=plan.kv_stages + 1),
        replace(plan, blocks=3),
        replace(plan, blocks=1, kv_stages=1, tile_n=512),
        replace(plan, rescale_threshold=100.0),
        replace(planned(Problem(192, 128), rows=64), blocks=2),
    ):
        with pytest.raises((PlanError, fa4flex.UnsupportedError)):
            wrong.check()


def test_pages_are_read_in_place() -> None:
    """The load warp copies rows of pages of a few keys itself."""
    for rows, (d, boxes) in product(TOGETHER, ((128, 4), (64, 8), (96, 4))):
        plan = planned(replace(PAGED, head_dim=d, head_dim_v=d, keys=in_pages(rows)))
        config = plan.config()
        assert config.box_rows == min(rows, plan.tile_n)
        assert config.gather_warps == (rows < boxes) and config.clears == (rows >= boxes)
        assert plan.topology.role("load").warps == 1
        assert {ring.lanes for ring in plan.topology.rings[:2]} == {32 if rows < boxes else 1}


def test_it_is_explained() -> None:
    text = planned(PAGED).explain()
    assert "32 rows, x 64 keys" in text and "2 of them on a multiprocessor" in text and "by shapes" in text
    assert "4 times in tensor memory" in text and "brought in 4 x 16 keys" in text
    assert "P tile 0 has ended when S tile 1 begins" in text
    assert "128 to each" in planned(FEW, Schedule(split=100)).explain()


# --- the pipeline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", ["dense", "used"])
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (96, 96), (192, 128), (256, 256)])
def test_it_runs_in_any_order(widths: tuple[int, int], lengths: str, seed: int) -> None:
    plan = planned(Problem(*widths, lengths=lengths), rows=64)  # type: ignore[arg-type]
    for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
        for tiles in TILES:
            simulate(plan.topology, tiles, pick)
    nodes = lifetimes(plan.topology, plan.columns).nodes
    assert all(nodes[c]["read"] for c in (("S", 2), ("P", 2), ("Q", 0), ("O", 5)))


def test_one_run_stands_for_all(seed: int) -> None:
    first = edges(trace(planned().topology, [3], round_robin()))
    assert len(first) > 100
    assert edges(trace(planned().topology, [3], at_random(seed))) == first


def test_counts_are_the_kernels() -> None:
    pipeline = planned().topology
    counts = counts_of(barrier_table(planned().kv_stages))
    assert counts == arrivals_of(pipeline)
    assert [counts[name] for name in ("Q full", "s_full", "p_full", "o_full")] == [4, 1, 4, 1]


def test_barriers_that_the_kernel_does_not_have_are_not_missing() -> None:
    run = trace(planned().topology, [4], round_robin())
    for j in range(3):
        assert ordered(run, f"read S tile {j}", f"product S tile {j + 1}")
        assert ordered(run, f"product O tile {j}", f"product S tile {j + 1}")
        assert ordered(run, f"product O tile {j}", f"update O tile {j + 1} use 0")


@pytest.mark.parametrize("width", [128, 256])
def test_every_dropped_event_is_found(width: int) -> None:
    """The copies' statistics are read by their own warps alone in the graph, and clearing changes nothing."""
    pipeline = planned(replace(PAGED, head_dim=width, head_dim_v=width)).topology
    assert not broken(pipeline, *TILES)
    every = [x for x in dropped(pipeline) if matters(*x[:2])]
    assert len(every) > 35
    for event, where, less in every:
        assert broken(less, *TILES), f"{event} of {where}"


def matters(event: Event, where: str) -> bool:
    """True if the graph finds that an event is missing. It knows of memory warp by warp: what other warps
    wrote is for the simulated GPU. An output that is read in parts is read."""
    crossing = (event.action, event.target) == ("sync", "meeting")
    return not (crossing or event.action == "clear" or (event.action == "read" and event.target == "O"))


def test_wrong_counts_are_found() -> None:
    wrong = wrong_counts(planned().topology)
    assert len(wrong) > 12 and all(broken(one, *TILES) for one in wrong)
    assert broken(with_ring(planned().topology, "k", stages=0))


@pytest.mark.parametrize("moved, to", [("Q", "S"), ("O", "S"), ("O", "P"), ("Q", "O")])
def test_columns_that_live_at_once_are_not_shared(moved: str, to: str) -> None:
    for problem in (FEW, Problem(256, 256)):
        refuses_columns(planned(problem), moved, to)
