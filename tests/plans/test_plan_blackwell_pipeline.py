"""The Blackwell forward's pipeline as the kernel has it, proved and broken."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product
from typing import Any

import networkx
import pytest
from barrier_counts import counts_of
from blackwell_plans import (
    TILES,
    dropped,
    edges,
    every_plan,
    fails_check,
    fault_of,
    find,
    moved,
    ordered,
    planned,
    sound,
    with_barrier,
    with_ring,
    with_role,
)

from fa4flex.kernels.fwd_sm100 import roles
from fa4flex.kernels.fwd_sm100.tiles import RINGS
from fa4flex.kernels.fwd_sm100.topology import CORE, STEPS
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.topology import Barrier, Event, Product, Role, Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace

WORKS: tuple[list[int], ...] = ([], [1], [2], [9], [1, 9], [9, 1, 9, 1], [1, 1, 1, 1], [4, 1, 3])
"""Key tiles of each work tile that a CTA takes: no work at all; one tile; alternating short and long rows."""


# --- the pipeline --------------------------------------------------------------------------------------


def test_every_plan_runs(seed: int) -> None:
    """Plans are checked when they are made; here again, with other rows and in a random order."""
    pipelines = list(dict.fromkeys(plan.topology for plan in every_plan()))
    assert len(pipelines) > 30
    for i, pipeline in enumerate(pipelines):
        check_counts(pipeline)
        assert simulate(pipeline, WORKS[i % len(WORKS)], at_random(seed + i)) > 0


@pytest.mark.slow
def test_every_plan_runs_any_rows_in_any_order(seed: int) -> None:
    for pipeline in dict.fromkeys(plan.topology for plan in every_plan()):
        for i, work in enumerate(WORKS):
            assert simulate(pipeline, work, round_robin() if i % 2 else at_random(seed + i)) > 0


@pytest.mark.parametrize("rings", RINGS)
def test_rings_of_any_depth_run(rings: tuple[int, int], seed: int) -> None:
    for q_tiles, out_stages in product((1, 2), (0, 1, 2)):
        pipeline = sound(
            replace(TILES, q_tiles=q_tiles, kv_stages=rings, out_stages=out_stages), dynamic=True
        )
        check_counts(pipeline)
        assert simulate(pipeline, [4, 1, 3], at_random(seed)) > 0


@pytest.mark.parametrize("dynamic", (False, True))
def test_one_run_stands_for_all(dynamic: bool, seed: int) -> None:
    """Whatever order steps are picked in, the same steps happen, after the same hand-overs."""
    pipeline = sound(dynamic=dynamic)
    first = edges(trace(pipeline, [3, 1], round_robin()))
    assert len(first) > 500
    for pick in (lambda n: 0, lambda n: n - 1, *(at_random(seed + i) for i in range(6))):
        assert edges(trace(pipeline, [3, 1], pick)) == first


def test_random_interleavings_differ(seed: int) -> None:
    def trail(pick_seed: int) -> list[str]:
        return [str(step) for step in trace(sound(), [2], at_random(pick_seed)).steps]

    assert trail(seed) == trail(seed)
    assert len({tuple(trail(random.Random(seed + i).randrange(1 << 30))) for i in range(3)}) > 1


def test_products_are_issued_in_the_stated_order() -> None:
    """One query tile is multiplied while the softmax of the other is taken, also across tiles of queries."""
    events = sound().role("multiply").run([3, 1])
    order = [f"{e.target} {e.tile}" for e in events if e.action == "issue" and "late" not in e.target]
    words = "S 0 0, S 1 0, " + "".join(
        f"O 0 early {j}, S 0 {j + 1}, O 1 early {j}, S 1 {j + 1}, " for j in range(3)
    )
    assert order == f"{words}O 0 early 3, O 1 early 3".split(", ")
    freed = [(e.target, e.tile) for e in events if e.action == "commit" and e.target.startswith("q")]
    assert freed == [("q 0", 0), ("q 1", 0), ("q 0", 1), ("q 1", 1)]  # after the last scores of each row


def test_counts_are_the_kernels() -> None:
    for q_tiles, out_stages, dynamic in product((1, 2), (0, 2), (False, True)):
        tiles = replace(TILES, q_tiles=q_tiles, out_stages=out_stages)
        pipeline = sound(tiles, dynamic)
        table = roles.barrier_table(tiles, "number" if dynamic else "")
        counts = counts_of(table)
        assert counts == arrivals_of(pipeline)
        assert counts["p_early 0"] == 8 and counts["p_late 0"] == 4 and counts["finals 0 full of warp 3"] == 1
        touching = sum(32 * role.warps for role in pipeline.roles if role.uses("sync", "allocated"))
        assert touching == roles.ALLOCATED.threads
        assert [b.number for b in pipeline.barriers] == [1, 2]
        assert sum(role.warps for role in pipeline.roles) == (roles.WARPS - (not dynamic) - (out_stages == 0))


def test_graph_joins_roles_by_what_they_hand_over() -> None:
    graph = sound(dynamic=True).graph
    assert graph.nodes["p_early 1"] == {"kind": "mbarrier", "arrivals": 8}
    assert graph.edges["softmax 1", "p_early 1"] == graph.edges["correction", "p_early 1"] == {"arrivals": 4}
    assert graph.edges["multiply", "k"] == {"empty": 1} and ("q 1", "multiply") in graph.edges
    assert {a for a, _ in graph.in_edges("next")} == {r.name for r in sound(dynamic=True).roles}
    assert networkx.has_path(graph, "load", "store")


# --- what the kernel leaves out ------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", (False, True))
def test_barriers_that_the_kernel_does_not_have_are_not_missing(dynamic: bool) -> None:
    run = trace(sound(dynamic=dynamic), [4, 1, 3], round_robin())
    for i, j in product(range(2), (0, 1, 2)):
        # no s_empty: all warps have read scores, and the product probabilities, before scores come again
        assert ordered(run, f"softmax {i} read S {i} tile {j}", f"product S {i} tile {j + 1}")
        assert ordered(run, f"product O {i} late tile {j}", f"product S {i} tile {j + 1}")
        # no scale_empty
        assert ordered(run, f"read scales {i} tile {j}", f"write scales {i} tile {j + 1}")
        # the correction warps arrive at p_early for the next tile of queries when they have read an output
        assert ordered(run, f"read O {i} tile 3 use {STEPS - 1}", f"product O {i} early tile 4")


def test_one_slot_for_the_next_number_is_enough() -> None:
    """All 15 warps have read a number before the next one is written, and none is two behind."""
    run = trace(sound(dynamic=True), [4, 1, 3], round_robin())
    readers = [str(step) for step in run.steps if str(step).endswith("read next tile 0")]
    assert len(readers) == 15
    assert ordered(run, "read next tile 0", "scheduler fill next tile 1")
    for short in (1, 4, 14):
        slot = with_ring(sound(dynamic=True), "next", empty_arrivals=short)
        assert "next" in fault_of(slot, [1, 1, 1, 1])


def test_an_answer_is_read_by_all_before_the_next_is_asked_for() -> None:
    """Also by the warp that asks, which must not ask again after a refusal."""
    pipeline = sound(asked=True)
    assert fault_of(pipeline) == ""
    run = trace(pipeline, [4, 1, 3], round_robin())
    assert sum(str(step).endswith("read next tile 0") for step in run.steps) == 16
    assert ordered(run, "read next tile 0", "load next tile 1")
    assert pipeline.ring("next").empty_arrivals == 16
    for short in (1, 15):
        assert "next" in fault_of(with_ring(pipeline, "next", empty_arrivals=short), [1, 1, 1, 1])


def test_the_first_arrival_at_p_early_stands_for_an_output_that_is_not_there() -> None:
    """Without it nothing is multiplied; a second one lets products begin before rescaling."""
    pipeline = sound()
    role = pipeline.role("correction")
    assert "deadlock" in fault_of(with_role(pipeline, replace(role, opening=role.opening[:2])), [1])
    twice = replace(role, opening=(*role.opening, role.opening[-1]))
    assert "p_early 1" in fault_of(with_role(pipeline, twice))


# --- broken pipelines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_tiles", "out_stages", "dynamic"), ((2, 2, False), (2, 2, True), (1, 0, True), (1, 2, False))
)
def test_every_dropped_event_is_found(q_tiles: int, out_stages: int, dynamic: bool) -> None:
    pipeline = sound(replace(TILES, q_tiles=q_tiles, out_stages=out_stages), dynamic, ragged=True)
    assert not fault_of(pipeline)
    found = 0
    for event, where, broken in dropped(pipeline, "softmax 1"):
        # What a clearing or a store leaves behind is no hand-over; outputs are read piece by piece, and the
        # next number by all.
        if event.action == "clear" or (event.action == "read" and event.target[0] in "On"):
            continue
        assert fault_of(broken) or fails_check(broken), f"{event} of {where}"
        found += 1
    assert found > 60


def test_every_wrong_count_is_found_by_sums_and_by_simulation() -> None:
    pipeline = sound(dynamic=True)
    broken = [
        with_barrier(pipeline, b.name, b.arrivals + more)
        for b, more in product(pipeline.mbarriers, (-1, 1))
        if b.arrivals + more
    ]
    for ring, (field, more) in product(pipeline.rings, product(("empty_arrivals", "full_arrivals"), (-1, 1))):
        if getattr(ring, field) + more:
            broken.append(with_ring(pipeline, ring.name, **{field: getattr(ring, field) + more}))
    for name in ("q 0", "k", "v"):
        size = pipeline.ring(name).transaction_bytes
        broken += [with_ring(pipeline, name, transaction_bytes=size + more) for more in (-16384, 16)]
    assert len(broken) > 30
    for wrong in broken:
        assert fails_check(wrong) and fault_of(wrong)


# role, part, event, the event to whose place it goes, and what is said
MOVED = (
    # scores are overwritten while the softmax still reads them, or probabilities while the product does
    ("softmax 0", "body", "read S 0", "arrive p_late 0", "nobody has read S 0 tile .* writes there"),
    ("softmax 0", "body", "await s_full 0", "read S 0", "reads S 0 tile . before it is there"),
    ("softmax 0", "first", "write P 0 early", "arrive p_early 0", "P 0 early tile . before it is there"),
    ("softmax 0", "first", "write P 0 late", "arrive p_late 0", "P 0 late tile . before it is there"),
    ("softmax 1", "body", "write scales 1", "arrive scale_full 1", "reads scales 1 tile . before it is"),
    ("multiply", "body", "await p_late 0", "issue O 0 late", "P 0 late tile . before it is there"),
    # outputs are rescaled while a product adds to them, or read before they are complete
    ("correction", "body", "update O 0", "arrive p_early 0", "(adds to|rescales) O 0 .* while"),
    ("correction", "body", "await scale_full 0", "update O 0", "reads scales 0 tile . before"),
    ("correction", "last", "await o_full 0", "arrive p_early 0", "reads O 0 tile . use 2 (while|before)"),
    ("correction", "last", "arrive p_early 0", "await o_full 0", "p_early 0 for phase|writes O 0 .* while"),
    # stages are freed or overwritten while they are needed
    ("multiply", "body", "commit k", "wait v", "k tile|k empty"),
    ("multiply", "body", "commit v", "wait v", "may still (write|multiply)|v empty"),
    ("load", "body", "load v", "acquire v", "v full|writes v tile . while"),
    ("store", "last", "release out", "drain out", "store frees out .* in use"),
    ("store", "last", "drain out", "store out", "store frees out .* in use"),
    ("correction", "last", "release finals 0", "read finals 0", "finals 0 tile . while"),
    ("softmax 0", "last", "fill finals 0", "acquire finals 0", "finals 0"),
    # tensor memory is freed while it is used, or used before it is there
    ("correction", "closing", "free tensor memory", "sync finished", "frees tensor memory while"),
    ("multiply", "opening", "sync allocated", "commit k", "while warp 0 of correction may still allocate"),
    (
        "correction",
        "opening",
        "sync allocated",
        "allocate tensor memory",
        "tensor memory while|still allocate",
    ),
)


@pytest.mark.parametrize("case", MOVED, ids=lambda case: f"{case[0]}: {case[2]}")
def test_an_event_out_of_place_is_named(case: tuple[Any, ...]) -> None:
    role, when, event, other, words = case
    pipeline = sound()
    at, to = (find(pipeline, role, when, wanted) for wanted in (event, other))
    broken = moved(pipeline, role, when, at, to)
    with pytest.raises(PlanError, match=words):
        for work in ([4, 1, 3], [1, 4, 1, 3]):
            simulate(broken, work, round_robin())


def test_scores_before_the_last_product_are_overwritten_scores() -> None:
    """S(j) ahead of O(j - 1): in the tensor core's order nothing then says that anybody has read S(j - 1)."""
    pipeline = sound()
    role = pipeline.role("multiply")
    scores = [e for e in role.body if e.target in ("k", "S 0", "s_full 0", "q 0") and e != role.body[-1]]
    body = (role.body[0], *scores, *(e for e in role.body[1:] if e not in scores))
    fault = fault_of(with_role(pipeline, replace(role, body=body)))
    assert re.match(
        r"the product S 0 tile 1 writes S 0 tile 1 while warp . of softmax 0 may still \w+ it", fault
    )


def test_a_ring_without_its_stages_does_not_fit_its_region() -> None:
    plan = planned(128, 128)
    for name in ("k", "v", "out"):
        wrong = replace(plan)
        less = with_ring(plan.topology, name, stages=plan.topology.ring(name).stages - 1)
        wrong.__dict__["of_one_cta"] = replace(less, places=())
        with pytest.raises(PlanError, match=rf"region {name} of \d+ bytes"):
            wrong.check()


def toy(*parts: Role, barriers: tuple[Barrier, ...]) -> Topology:
    return Topology(parts, (), (), mbarriers=barriers)


def test_a_waiter_two_phases_behind_is_found() -> None:
    """A parity bit tells phases apart only from their neighbours."""
    hasty = Role("hasty", 1, first=(Event("arrive", "x"),), body=(Event("arrive", "x"),))
    waiter = Role("waiter", 1, first=(Event("await", "x"),), body=(Event("await", "x"),))
    fault = fault_of(toy(hasty, waiter, barriers=(Barrier("x", 1),)), [3])
    assert fault == "waiter may be two phases behind at x: phase 1 ends while it may still wait for phase 0"
    patient = replace(hasty, body=(Event("await", "y", -1), Event("arrive", "x")))
    answers = (Event("await", "x"), Event("arrive", "y"))
    answering = replace(waiter, first=answers, body=answers)
    assert not fault_of(toy(patient, answering, barriers=(Barrier("x", 1), Barrier("y", 1))), [3])
    skipping = replace(waiter, first=(), body=(Event("await", "x"),), opening=(Event("await", "x", 1),))
    assert "may see at x the parity" in fault_of(toy(hasty, skipping, barriers=(Barrier("x", 2),)), [3])


def test_what_is_left_over_at_the_end_is_found() -> None:
    once = Role("once", 1, first=(Event("arrive", "x"),))
    assert "1 arrivals and 0 bytes are left over at x" in fault_of(
        toy(once, barriers=(Barrier("x", 2),)), [1]
    )
    write = Event("write", "cell")
    unread = Role("unread", 1, first=(write,))
    assert fault_of(toy(unread, barriers=()), [1]) == "nobody has read cell tile 0 at the end"
    result = Product("S", (), Event("write", "S"), engine=CORE)
    launches = Role("launches", 1, first=(Event("issue", "S"),), products=(result,))
    assert "the product S tile 0 may not be over" in fault_of(toy(launches, barriers=()), [1])


def test_products_are_executed_in_order_and_signal_when_they_are_done() -> None:
    """Without the order nothing would say that O has read P when S is there."""
    pipeline = sound()
    role = pipeline.role("multiply")
    split = [replace(p, engine=f"{CORE} {p.name[0]}") for p in role.products]
    run = trace(pipeline, [3], round_robin())
    assert ordered(run, "product O 0 early tile 0", "product S 0 tile 1")
    assert {p.engine for p in split} == {f"{CORE} S", f"{CORE} O"} and {p.engine for p in role.products} == {
        CORE
    }
    early = moved(pipeline, "multiply", "body", find(pipeline, "multiply", "body", "commit s_full 0"), 0)
    assert "S 0" in fault_of(early) or "s_full 0" in fault_of(early)
