"""Plans of the Blackwell kernel for latent rows: what fits, and its pipeline in any order of events; what it
refuses as Hopper's does stands with that one's (test_plan_mla_decode.py)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from broken_graphs import is_red, with_role
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.kernels import dispatch
from fa4flex.kernels.mla_decode_sm100.plan import MLA_DECODE_SM100, BlackwellLatentPlan
from fa4flex.kernels.mla_decode_sm100.topology import latent_topology
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.keys import CONTIGUOUS, LatentKeys
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule

FACTS = fa4flex.compile().program.facts
ROWS = Problem(576, 512, keys=LatentKeys())


def planned(problem: Problem, schedule: Schedule = Schedule()) -> BlackwellLatentPlan:
    plan = plan_forward(FACTS, problem, SM100A, schedule, sizes=sizes_of(64))
    assert isinstance(plan, BlackwellLatentPlan)
    return plan


# --- which problems -----------------------------------------------------------------------------------


def test_it_takes_latent_rows_and_no_others() -> None:
    assert dispatch.choose("forward", ROWS, SM100A, sizes_of(64)) is MLA_DECODE_SM100
    for problem in (Problem(256, 256), Problem(192, 128)):
        assert dispatch.choose("forward", problem, SM100A, sizes_of(64)) is not MLA_DECODE_SM100
    with pytest.raises(fa4flex.UnsupportedError, match="sm_100a"):
        dispatch.choose("forward", replace(ROWS, keys=CONTIGUOUS), SM100A, sizes_of(64))


def test_parts_of_a_schedule_are_tiles() -> None:
    assert planned(ROWS, Schedule(split=300)).splitting.share == 5


# --- what fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "widths, held, stages",
    [((576, 512), 448, 2), ((512, 512), 448, 3), ((448, 384), 384, 3), ((320, 256), 256, 5)],
    ids=str,
)
def test_resources(widths: tuple[int, int], held: int, stages: int) -> None:
    """Queries lie where there is room: all columns of tensor memory are used at full width."""
    width, value = widths
    plan = planned(replace(ROWS, head_dim=width, head_dim_v=value))
    plan.check()
    config, ranges = plan.config(), {r.name: r for r in plan.columns.ranges}
    assert config.held == held and plan.kv_stages == stages
    assert plan.memory["q"].size == 64 * (width - held) * 2
    assert plan.memory["k"].size == stages * 64 * width * 2 and plan.memory["p"].size == 64 * 64 * 2
    assert {name: r.count for name, r in ranges.items()} == {"O": value // 2, "S": 32, "Q": held // 2}
    assert config.products * config.product_columns == value and config.product_columns in (128, 256)
    more = replace(plan, kv_stages=stages + 1)
    with pytest.raises(fa4flex.UnsupportedError, match="shared memory"):
        more.memory.check()


def test_it_is_explained() -> None:
    told = planned(ROWS).explain()
    for words in (
        "a row is key and value",
        "two lanes of tensor memory",
        "448 columns of queries",
        "512 columns",
    ):
        assert words in told, words


# --- the pipeline -------------------------------------------------------------------------------------


def sound(clears: bool, stages: int = 2) -> Topology:
    columns = Columns((Range("O", 0, 64), Range("S", 64, 32), Range("Q", 96, 32)), 512)
    return latent_topology(128, 64, stages, columns, clears)


def test_it_runs_in_any_order(seed: int) -> None:
    for clears, tiles, stages in product((True, False), (1, 2, 5), (2, 3)):
        pipeline = sound(clears, stages)
        check_counts(pipeline)
        for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
            simulate(pipeline, [tiles], pick)


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits, signals or gatherings, the pipeline fails its checks or some run: but where
    warps meet to read each other's numbers, as in the graph each reads its own."""
    needed, tried = ("acquire", "wait", "commit", "sync", "load", "fill", "arrive", "await"), 0
    implied = (("sync", "halves"), ("sync", "meeting"))
    for pipeline in (sound(False), sound(True)):
        for role in pipeline.roles:
            for part in ("opening", "first", "body", "last"):
                events = getattr(role, part)
                for i, event in enumerate(events):
                    if event.action not in needed or (event.action, event.target) in implied:
                        continue
                    broken = with_role(pipeline, replace(role, **{part: events[:i] + events[i + 1 :]}))
                    assert is_red(broken, seed, ([1], [2], [3])), (role.name, part, event)
                    tried += 1
    assert tried >= 40
