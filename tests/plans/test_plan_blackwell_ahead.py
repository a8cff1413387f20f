"""The Blackwell forward of heads up to 256: one query tile, whose scores have two stages. The kernel's
pipeline, proved and broken, alone and in pairs of CTAs; what is chosen, explained and refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from barrier_counts import counts_of
from blackwell_plans import (
    CAUSAL,
    broken,
    dropped,
    edges,
    fault_of,
    find,
    moved,
    ordered,
    planned,
    with_columns,
    with_role,
    wrong_counts,
)
from checked_plans import plan_forward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm100 import roles
from fa4flex.kernels.fwd_sm100.config import Registers
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100, BlackwellPlan
from fa4flex.kernels.fwd_sm100.registers import AHEAD
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.pairs import THERE
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.target import SM100A, SM103A
from fa4flex.kernels.plan.tensor_memory import WHOLE
from fa4flex.kernels.plan.topology import Event, Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace
from fa4flex.primitives.schedule import Schedule

WIDTHS = ((256, 256), (200, 200), (160, 160), (64, 256), (256, 128), (192, 136))
WORKS: tuple[list[int], ...] = (
    [], [1], [2], [3], [9], [1, 9], [9, 1, 9, 1], [1, 1, 1, 1], [2, 2, 2], [1, 2, 1, 3], [4, 1, 3]
)  # fmt: skip
"""Key tiles of each tile of queries: with one, two and more tiles ahead of the next row's."""
FEW: tuple[list[int], ...] = ([4, 1, 1, 3], [2, 2, 1], [1, 4, 2])


def every_plan() -> Iterator[BlackwellPlan]:
    forms = (("dense", "none"), ("dense", "tables"), ("packed", "spans"), ("used", "none"))
    for (d, dv), (lengths, mask_form) in product(WIDTHS, forms):
        yield planned(d, dv, lengths=lengths, mask_form=mask_form)
    for schedule in (Schedule(tile=(128, 64)), Schedule(next_tile="launch_control")):
        plan = plan_forward(CAUSAL, Problem(256, 256, mask_form="spans"), SM100A, schedule)
        assert isinstance(plan, BlackwellPlan)
        yield plan


def alone(ragged: bool = True) -> Topology:
    return planned(256, 256, lengths="packed" if ragged else "dense", mask_form="spans").topology


def pair() -> Topology:
    return planned(256, 256).topology


# --- the pipeline --------------------------------------------------------------------------------------


def test_every_plan_runs(seed: int) -> None:
    pipelines = list(dict.fromkeys(plan.topology for plan in every_plan()))
    assert len(pipelines) > 5
    for i, pipeline in enumerate(pipelines):
        for work in random.sample(WORKS, 4):
            assert simulate(pipeline, work, at_random(seed + i)) > 0


def test_any_rows_run(seed: int) -> None:
    for i, work in enumerate(WORKS):
        assert simulate(alone(), work, at_random(seed + i)) > 0
        assert simulate(pair(), work, round_robin()) > 0


def test_one_run_stands_for_all(seed: int) -> None:
    first = edges(trace(alone(), [3, 1], round_robin()))
    assert len(first) > 300
    for i in range(4):
        assert edges(trace(alone(), [3, 1], at_random(seed + i))) == first


def test_products_are_issued_in_the_stated_order() -> None:
    """Two scores are ahead of an output, but for the one after a row of one key tile."""
    events = alone().role("multiply").run([3, 1, 2])
    order = [f"{e.target[0]} {e.tile}" for e in events if e.action == "issue" and "late" not in e.target]
    assert ", ".join(order) == "S 0, S 1, O 0, S 2, O 1, S 3, O 2, O 3, S 4, S 5, O 4, O 5"
    freed = [(e.target, e.tile) for e in events if e.action == "commit" and e.target == "q 0"]
    assert freed == [("q 0", 0), ("q 0", 1), ("q 0", 2)]
    paired = pair().role("multiply").run([2])
    assert [e.target for e in paired if e.action == "issue"][:2] == ["S 0", f"S 0{THERE}"]


@pytest.mark.parametrize("ctas", (1, 2))
def test_counts_are_the_kernels(ctas: int) -> None:
    plan = planned(256, 256) if ctas == 2 else planned(256, 256, lengths="used")
    table = roles.barrier_table(plan.config(), plan.config().handed, ctas)
    counts = counts_of(table)
    if ctas == 2:
        counts |= counts_of(table, 1) | {"freed": 32, "freed there": 32}
    assert counts == arrivals_of(plan.topology)
    assert counts["p_early 0 0"] == counts["p_early 0 1"] == 8 * ctas
    assert counts["p_late 0 1"] == 4 * ctas and counts["scale_full 0 1 of warp 3"] == counts["o_full 0"] == 1


@pytest.mark.parametrize("ctas", (1, 2))
def test_barriers_that_the_kernel_does_not_have_are_not_missing(ctas: int) -> None:
    run = trace(pair() if ctas == 2 else alone(), [4, 1, 3], round_robin())
    for c, j in product(("", THERE)[:ctas], range(6)):
        assert ordered(run, f"softmax 0{c} read S 0{c} tile {j}", f"product S 0{c} tile {j + 2}")
        assert ordered(run, f"product O 0 late{c} tile {j}", f"product S 0{c} tile {j + 2}")
        assert ordered(run, f"product O 0 late{c} tile {j}", f"product O 0 early{c} tile {j + 1}")
        if j < 3:
            assert ordered(run, f"read scales 0{c} tile {j}", f"write scales 0{c} tile {j + 2}")


def test_stages_of_scores_are_apart() -> None:
    plan = planned(256, 256)
    plan.columns.check()
    assert plan.config().memory.apart == 128 and max(r.end for r in plan.columns.ranges) == 512
    shared = {frozenset(pair) for pair in plan.columns.overlaps if WHOLE not in pair}
    assert shared == {frozenset(("S 0", f"P 0 {part}")) for part in ("early", "late")}
    graph = lifetimes(plan.of_one_cta, plan.columns)
    for part, j in product(("early", "late"), range(4)):
        assert graph.has_edge(("S 0", j), (f"P 0 {part}", j))
        assert graph.has_edge((f"P 0 {part}", j), ("S 0", j + 2))
        assert not graph.has_edge((f"P 0 {part}", j), ("S 0", j + 1))
    text = plan.columns.explain()
    assert text.count("S 0") == 2 and "512 columns of 512" in text


@pytest.mark.parametrize(
    ("name", "first", "words"),
    (
        ("P 0 early", 128, "shares columns with another one"),  # of the other stage's scores
        ("P 0 early", 240, "shares columns|in columns"),  # over the output
        ("P 0 late", 64, "live at once|while|nobody has read|written over"),  # over the first probabilities
        ("O 0", 192, "shares columns"),
    ),
)
def test_columns_that_live_at_once_are_not_shared(name: str, first: int, words: str) -> None:
    plan = replace(planned(256, 256, lengths="used"), tiles=planned(256, 256, lengths="used").tiles)
    columns = with_columns(planned(256, 256).columns, name, first)
    plan.__dict__["columns"] = columns
    with pytest.raises(PlanError, match=words):
        columns.check()
        simulate(replace(plan.of_one_cta, overlaps=columns.overlaps), [4], round_robin())
        lifetimes(plan.of_one_cta, columns)


# --- broken pipelines ----------------------------------------------------------------------------------


def matters(event: Event) -> bool:
    """True but for what is no hand-over: clearing, reads of pieces of an output, and of the next number."""
    return event.action != "clear" and not (event.action == "read" and event.target[0] in "On")


def test_every_dropped_event_is_found() -> None:
    pipeline, found = alone(), 0
    assert not broken(pipeline, *FEW)
    for event, where, less in dropped(pipeline):
        if matters(event):
            assert broken(less, *FEW), f"{event} of {where}"
            found += 1
    assert found > 60


def test_dropped_events_of_a_pair_are_found() -> None:
    pipeline = pair()
    assert not broken(pipeline, *FEW)
    every = [x for x in dropped(pipeline) if matters(x[0])]
    assert len(every) > 100
    for event, where, less in random.sample(every, 12):
        assert broken(less, *FEW), f"{event} of {where}"


def test_every_wrong_count_is_found() -> None:
    for pipeline, count in ((alone(), 20), (pair(), 30)):
        wrong = wrong_counts(pipeline)
        assert len(wrong) > count and all(broken(one, *FEW) for one in random.sample(wrong, 12))


MOVED = (
    ("softmax 0", "body", "read S 0", "arrive p_late 0", "nobody has read S 0 tile .* writes there"),
    ("softmax 0", "body", "await s_full 0", "read S 0", "reads S 0 tile . before it is there"),
    ("softmax 0", "body", "write scales 0", "arrive scale_full 0", "reads scales 0 tile . before it is"),
    ("multiply", "body", "await p_late 0", "issue O 0 late", "P 0 late tile . before it is there"),
    # the output is rescaled while a product adds to it: scores that are there do not tell
    ("correction", "body", "await o_full 0", "update O 0", "rescales O 0 .* (while|before)"),
    ("correction", "body", "update O 0", "arrive p_early 0", "(adds to|rescales) O 0 .* while"),
    ("correction", "last", "await o_full 0", "arrive p_early 0", "reads O 0 tile . use 2 (while|before)"),
    # the next queries come before the last scores of these, or too late
    ("multiply", "body", "wait q 0", "commit k", "reads q 0|q 0 tile|multiplies q 0"),
    ("multiply", "body", "commit o_full 0", "wait v", "reads O 0|rescales O 0|O 0 tile"),
)


@pytest.mark.parametrize("case", MOVED, ids=lambda case: f"{case[0]}: {case[2]}")
def test_an_event_out_of_place_is_named(case: tuple[Any, ...]) -> None:
    role, when, event, other, words = case
    pipeline = alone()
    at, to = (find(pipeline, role, when, wanted) for wanted in (event, other))
    wrong = moved(pipeline, role, when, at, to)
    with pytest.raises(PlanError, match=words):
        for work in FEW:
            simulate(wrong, work, round_robin())


def test_scores_one_tile_further_ahead_are_overwritten_scores() -> None:
    """S(j + 2) ahead of O(j): nothing then says that anybody has read S(j)."""
    pipeline = alone()
    role = pipeline.role("multiply")
    at = next(i for i, e in enumerate(role.body) if (e.action, e.target) == ("wait", "k"))
    hasty = with_role(pipeline, replace(role, body=(*role.body[at:], *role.body[:at])))
    assert "S 0 tile 2 while warp" in fault_of(hasty, [5])


# --- what is chosen ------------------------------------------------------------------------------------


def test_pairs_where_sequences_are_dense() -> None:
    for (d, dv), mask_form in product(WIDTHS, ("none", "spans", "tables")):
        plan = planned(d, dv, mask_form=mask_form)
        assert plan.tile == (256, 128) and plan.tiles.ctas == 2 and plan.tiles.score_stages == 2
        assert plan.tiles.head_dim_v == 256 and not plan.dynamic
        assert plan.memory.total <= SM100A.shared_memory and plan.exponential.count == 0
    assert planned(256, 256, 128).tile == (128, 64)  # the other CTA would have no queries
    for lengths in ("packed", "used"):
        plan = planned(256, 256, lengths=lengths, mask_form="spans")
        assert plan.tile == (128, 64) and plan.tiles.ctas == 1 and plan.dynamic
    assert planned(200, 200).config().depth == 13 and planned(64, 256).tiles.head_dim == 64
    assert planned(192, 128).tiles.score_stages == 1  # as before


def test_a_schedule_has_the_last_word() -> None:
    def of(**schedule: Any) -> BlackwellPlan:
        plan = plan_forward(CAUSAL, Problem(256, 256, mask_form="spans"), SM100A, Schedule(**schedule))
        assert isinstance(plan, BlackwellPlan)
        return plan

    assert of(tile=(128, 64)).tiles.ctas == of(next_tile="counter").tiles.ctas == 1
    assert of(next_tile="launch_control").tiles.ctas == 2 and of(next_tile="launch_control").cancel
    with pytest.raises(UnsupportedError, match=r"\[\(128, 64\), \(256, 128\)\]"):
        of(tile=(128, 128))
    with pytest.raises(UnsupportedError, match="pairs of CTAs, which take no sequences"):
        plan_forward(Facts(), Problem(256, 256, lengths="used"), SM100A, Schedule(tile=(256, 128)))


def test_wider_heads_and_pages_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="264"):
        plan_forward(Facts(), Problem(264, 256), SM100A)
    paged = Problem(256, 256, lengths="used", keys=in_pages(128))
    assert not FWD_SM100.accepts(paged, SM100A, sizes_of())
    assert plan_forward(Facts(), Problem(256, 256), SM103A).tile == (256, 128)


def test_the_idle_warpgroup_leaves_its_registers() -> None:
    assert 128 * (AHEAD.softmax + AHEAD.correction + AHEAD.other + AHEAD.idle) == SM100A.registers
    plan = planned(256, 256)
    assert plan.registers == AHEAD
    for bad, words in (
        (replace(AHEAD, idle=40), "240 \\+ 128 \\+ 112 \\+ 40 = 520"),
        (replace(AHEAD, idle=16), "16 registers per idle thread"),
        (Registers(240, 80, 48), "2 x 240 \\+ 80 \\+ 48 = 608"),
    ):
        with pytest.raises(PlanError, match=words):
            replace(plan, registers=bad).check()


def test_explain_says_what_will_run() -> None:
    text = planned(256, 256).explain()
    for words in (
        "1 x 128 queries x 128 keys", "scores of the next keys are multiplied while", "pairs of CTAs",
        "start S 0_j+1", "if it starts a row", "if the row goes on", "wait for o_full 0_j-1",
        "P 0 late tile 0 has ended when S 0 tile 2 begins", "512 columns of 512", "and 32 of an idle one",
    ):  # fmt: skip
        assert words in text, words
