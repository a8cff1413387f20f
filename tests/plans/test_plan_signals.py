"""Signals that graphs expect of warps at barriers; how a run is read and compared; forward passes by
pairs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from blackwell_plans import broken, dropped, edges, every_plan, fails_check, wrong_counts
from checked_plans import plan_backward, plan_forward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.fwd_sm100.plan import BlackwellPlan
from fa4flex.kernels.plan.pairs import THERE
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.signals import Signal, difference, expected, rows_of
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Event, Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, trace
from fa4flex.primitives.schedule import Schedule

WORKS = ([1], [2, 5], [3, 1, 1, 4])


def in_pairs(asks: bool = False) -> Topology:
    schedule = Schedule(next_tile="launch_control" if asks else "auto")
    plan = plan_forward(Facts(), Problem(128, 128), SM100A, schedule, sizes=sizes_of())
    assert isinstance(plan, BlackwellPlan) and plan.tiles.ctas == 2
    return plan.topology


def pipelines() -> list[Topology]:
    problems = Problem(64, 64), Problem(128, 128, lengths="packed"), Problem(192, 192, deterministic=True)
    backward = [plan_backward(Facts(), p, SM90A) for p in problems]
    backward += [plan_backward(Facts(), Problem(d, 128), SM100A) for d in (64, 192)]
    backward.append(plan_backward(Facts(), Problem(128, 128, met_alike=True), SM100A, sizes=sizes_of()))
    forward = [plan_forward(Facts(), replace(p, deterministic=False), SM90A) for p in problems]
    return [*(plan.topology for plan in (*backward, *forward)), in_pairs(), in_pairs(True)]  # type: ignore[attr-defined]


def test_rows_are_read_from_what_the_first_role_did() -> None:
    for pipeline in pipelines():
        role = pipeline.roles[0]
        for works in ([1], [4]) if pipeline.one_tile else WORKS:
            assert rows_of(pipeline, expected(pipeline, role, 0, works)) == works
        if role.empty and not pipeline.one_tile:
            assert rows_of(pipeline, expected(pipeline, role, 0, [0, 2, 0, 0, 1])) == [0, 2, 0, 0, 1]


def test_a_run_that_stops_is_read_as_far_as_it_goes() -> None:
    pipeline = pipelines()[0]
    whole = expected(pipeline, pipeline.roles[0], 0, [3, 2])
    for end in range(4, len(whole)):
        rows = rows_of(pipeline, whole[:end])
        again = expected(pipeline, pipeline.roles[0], 0, rows)
        said = difference("producer", 0, again, whole[:end])
        stopped = said is not None and said.number == end and said.found is None
        assert stopped or again == whole[:end], (end, rows)


def test_each_barrier_has_one_place() -> None:
    for pipeline in pipelines():
        assert any(pipeline.places)
        first, *others = pipeline.places
        name = next(name for name in first if name)
        for wrong in ((*first, name), tuple("" if x == name else x for x in first), (*first, "another")):
            assert "place" in fails_check(replace(pipeline, places=(wrong, *others)))
    assert not any(fails_check(plan.topology) for plan in every_plan())


WAIT, SYNC = Signal("wait", "x full", 0, again=True), Signal("sync", "rows", amount=128, maybe=True)
ARRIVE = Signal("arrive", "x empty", amount=1)


def test_what_may_be_left_out_or_repeated() -> None:
    graph = [WAIT, SYNC, ARRIVE, replace(WAIT, parity=1), ARRIVE]
    for run in (
        graph,
        [WAIT, ARRIVE, replace(WAIT, parity=1), ARRIVE],
        [WAIT, WAIT, SYNC, ARRIVE, WAIT, replace(WAIT, parity=1), ARRIVE],
    ):
        assert difference("role", 0, graph, run) is None
    for run, number in (
        (graph[:-1], 4),  # an arrival is missing at the end
        ([*graph, ARRIVE], 5),
        ([WAIT, SYNC, SYNC, *graph[2:]], 2),
        ([WAIT, replace(WAIT, parity=1), *graph[1:]], 1),  # a phase too early
        ([SYNC, WAIT, ARRIVE, *graph[3:]], 0),
        ([replace(WAIT, at="y full"), *graph[1:]], 0),
        ([WAIT, SYNC, replace(ARRIVE, amount=32), *graph[3:]], 2),
    ):
        said = difference("role", 0, graph, run)
        assert said is not None and said.number == number
    told = str(difference("role", 3, graph, [WAIT, SYNC]))
    assert "role, warp 3, signal 2" in told and "expected   arrive x empty, 1" in told
    assert "found      the end" in told and "after      wait x full, parity 0" in told


def test_a_wait_that_may_be_left_out_comes_again() -> None:
    early = replace(WAIT, maybe=True, again=False)
    graph = [early, SYNC, WAIT, ARRIVE]
    for run in ([WAIT, SYNC, WAIT, ARRIVE], [WAIT, ARRIVE], [WAIT, WAIT, ARRIVE]):
        assert difference("role", 0, graph, run) is None
    for run, number in (([WAIT, SYNC, ARRIVE], 2), ([SYNC, ARRIVE], 1), ([ARRIVE], 0)):
        said = difference("role", 0, graph, run)
        assert said is not None and said.number == number


# --- the forward pass by pairs of CTAs -------------------------------------------------------------------


@pytest.mark.parametrize("asks", [False, True])
def test_one_run_of_a_pair_stands_for_all(asks: bool, seed: int) -> None:
    pipeline = in_pairs(asks)
    first = edges(trace(pipeline, [3, 1], round_robin()))
    assert len(first) > 1000 and edges(trace(pipeline, [3, 1], at_random(seed))) == first


@pytest.mark.parametrize("asks", [False, True])
def test_dropped_events_of_a_pair_are_found(asks: bool) -> None:
    pipeline = in_pairs(asks)
    every = [x for x in dropped(pipeline) if matters(x[0])]
    assert len(every) > 180
    for event, where, less in random.sample(every, 6):
        assert broken(less), f"{event} of {where}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("asks", [False, True])
def test_every_dropped_event_of_a_pair_is_found(asks: bool) -> None:
    for event, where, less in dropped(in_pairs(asks)):
        assert not matters(event) or broken(less), f"{event} of {where}"


def matters(event: Event) -> bool:
    """Outputs are read piece by piece, and the answer by all, some of whom are told by what follows from it;
    what is announced is counted with its copy."""
    name = event.target.removesuffix(THERE)
    reads = (event.action == "read" and name[0] in "On") or (event.action, name) == ("wait", "next")
    return not reads and event.action not in ("announce", "clear")


def test_wrong_counts_of_a_pair_are_found() -> None:
    wrong = wrong_counts(in_pairs(True))
    assert len(wrong) > 60 and all(broken(one, [4, 1, 3]) for one in random.sample(wrong, 6))
