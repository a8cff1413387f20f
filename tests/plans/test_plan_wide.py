"""Plans of the Hopper kernel for wide heads: what it accepts, what fits, how rows and keys are shared, and
its pipeline in any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from broken_graphs import is_red, with_role
from checked_plans import plan_forward

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels import dispatch
from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.fwd_wide_sm90.config import instruction_columns
from fa4flex.kernels.fwd_wide_sm90.plan import FWD_WIDE_SM90, WidePlan
from fa4flex.kernels.fwd_wide_sm90.topology import wide_topology
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import UNKNOWN, Sizes
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import alibi, causal

FACTS = fa4flex.compile().program.facts
WIDE = Problem(512, 512)


def sizes(q_len: int, heads: int = 8, kv_heads: int = 4, batch: int = 2) -> Sizes:
    return Sizes(Inputs(Shape(batch, heads, q_len, 5000), kv_heads, 512, 512))


def planned(
    problem: Problem = WIDE,
    facts: Facts = FACTS,
    schedule: Schedule = Schedule(),
    call: Sizes = UNKNOWN,
) -> WidePlan:
    plan = plan_forward(facts, problem, SM90A, schedule, sizes=call)
    assert isinstance(plan, WidePlan)
    return plan


# --- which problems -----------------------------------------------------------------------------------


def test_it_takes_wide_heads_and_no_others() -> None:
    for widths, taken in (((264, 64), True), ((64, 264), True), ((256, 256), False), ((576, 576), True)):
        found = dispatch.choose("forward", Problem(*widths), SM90A)
        assert (found is FWD_WIDE_SM90) == taken, widths
    with pytest.raises(fa4flex.UnsupportedError, match="at most 576"):
        replace(WIDE, head_dim_v=584)


PAGES = in_pages(64)


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": PAGES, "lengths": "used"},
        {"statistics": ("lse", "max_scores")},
        {"statistics": ("lse", "entropy")},
        {"dropout": True},
        {"weights": "elementwise"},
        {"output": True},
    ],
    ids=str,
)
def test_others_have_no_kernel(changes: dict[str, Any]) -> None:
    """Calls of these are computed another way: see tests/doors/test_wide_calls.py."""
    assert dispatch.accepting("forward", replace(WIDE, **changes), SM90A, UNKNOWN) is None


@pytest.mark.parametrize("direction", ["backward", "tangents", "mass"])
def test_other_passes_and_chips_have_no_kernel(direction: dispatch.Direction) -> None:
    assert dispatch.accepting(direction, replace(WIDE, moved=("q",)), SM90A, UNKNOWN) is None
    assert dispatch.accepting("forward", WIDE, SM100A, UNKNOWN) is None


# --- what fits ----------------------------------------------------------------------------------------


def test_all_widths_fit() -> None:
    """Columns of a warpgroup are whole blocks, and instructions whole parts of them."""
    for d, dv in product(range(8, 577, 8), repeat=2):
        if max(d, dv) > 256 and (d % 64 < 16 or dv % 64 < 16):
            plan = planned(Problem(d, dv))
            config = plan.config()
            assert config.head_dim >= d > config.head_dim - 64 and config.head_dim_v >= dv
            columns = instruction_columns(config.columns)
            assert columns <= 256 and columns % 32 == 0 and config.columns % columns == 0
            assert plan.need.total <= plan.registers.consumer


@pytest.mark.parametrize(
    "widths, tile, stages",
    [((320, 320), 64, 2), ((384, 384), 64, 1), ((512, 512), 64, 1), ((576, 512), 64, 1), ((576, 576), 32, 2)],
)
@pytest.mark.parametrize("lengths", ["dense", "packed", "used"])
def test_tiles(widths: tuple[int, int], tile: int, stages: int, lengths: Any) -> None:
    plan = planned(Problem(*widths, lengths=lengths))
    plan.check()
    assert plan.tile == (64, tile) and plan.kv_stages == stages
    assert plan.memory["p"].size == 2 * 64 * tile * 2


def test_schedules_are_honoured_or_refused() -> None:
    assert planned(schedule=Schedule(tile=(64, 32))).tile == (64, 32)
    with pytest.raises(fa4flex.UnsupportedError, match=r"tile=\(64, 64\)"):
        planned(schedule=Schedule(tile=(128, 64)))
    with pytest.raises(fa4flex.UnsupportedError, match="launch_control"):
        planned(schedule=Schedule(next_tile="launch_control"))


# --- rows and splits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, packed", [(4, 1), (8, 2), (12, 1), (32, 8), (64, 16), (128, 1)])
def test_heads_of_a_group_are_rows(heads: int, packed: int) -> None:
    """A KV head has four; where scores differ by head, up to eight."""
    assert planned(call=sizes(3000, heads)).packed_heads == packed
    by_head = fa4flex.compile(alibi, causal).program.facts
    problem = replace(WIDE, mask_form="spans")
    assert planned(problem, by_head, call=sizes(3000, heads)).packed_heads == (packed if packed < 16 else 1)


def test_keys_of_few_rows_are_split() -> None:
    """The launch of one call serves others on its side of the limit."""
    for q_len, few in ((1, True), (32, True), (33, False)):
        call = sizes(q_len)
        plan = planned(call=call)
        assert plan.split == few and (plan.splitting is not None) == few
        assert plan.persistent != few
        reach: Reach = call.valid
        assert reach.holds((2, q_len, 5000)) and not reach.holds((2, 32 + few, 5000))
    splitting = planned(call=sizes(1)).splitting
    assert splitting is not None and splitting.splits(1, 4, 8192, 8).most > 8
    apart = planned(call=sizes(1, 12)).splitting
    assert apart is not None and apart.splits(1, 4, 8192, 12)[:2] == splitting.splits(3, 12, 8192, 12)[:2]


@pytest.mark.parametrize("changes", [{"lengths": "packed"}, {"mask_form": "tables"}], ids=str)
def test_others_are_not_split(changes: dict[str, Any]) -> None:
    facts = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: (q_idx * kv_idx + h) % 3 > 0).program.facts
    problem = replace(WIDE, **changes)
    assert not planned(problem, FACTS if "lengths" in changes else facts, call=sizes(1)).split


def test_it_is_explained() -> None:
    told = planned(call=sizes(1)).explain()
    assert "half of a tile's keys" in told and "split between blocks" in told
    assert "rows of 2 heads" in told


# --- the pipeline -------------------------------------------------------------------------------------


def sound(stages: int, dynamic: bool, clears: bool) -> Topology:
    return wide_topology(Tiles(64, 64, 512, 512), stages, dynamic, clears)


def test_it_runs_in_any_order(seed: int) -> None:
    for stages, dynamic, clears in product((1, 2), (False, True), (False, True)):
        pipeline = sound(stages, dynamic, clears)
        check_counts(pipeline)
        for tiles in ([1], [2, 1, 3], [5, 4]):
            for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
                simulate(pipeline, tiles, pick)


RUNS = ([1], [3, 1, 2])
"""Key tiles of each tile of queries, of runs in which something is left out."""


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits, releases or gatherings, the pipeline fails its checks or some run."""
    needed = "acquire", "wait", "release", "finish", "sync", "load"
    for stages in (1, 2):
        pipeline, tried = sound(stages, False, False), 0
        for role in pipeline.roles:
            for part in ("first", "body", "last"):
                for i, event in enumerate(getattr(role, part)):
                    if event.action in needed:
                        left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                        assert is_red(with_role(pipeline, replace(role, **{part: left})), seed, RUNS), (
                            role,
                            event,
                        )
                        tried += 1
        assert tried >= 40
