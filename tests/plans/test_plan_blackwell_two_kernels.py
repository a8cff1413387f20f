"""Plans of the two Blackwell backward kernels of heads up to 256: pipelines, proved and broken; memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from barrier_counts import counts_of
from blackwell_plans import awaits_nothing, broken, dropped, edges, ordered, with_columns, wrong_counts
from checked_plans import plan_backward

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.bwd_sm100.config import Registers
from fa4flex.kernels.bwd_sm100.two_kernels.plan import TwoKernelsPlan
from fa4flex.kernels.bwd_sm100.two_kernels.roles import barrier_table, value_barriers
from fa4flex.kernels.bwd_sm100.wide_heads.plan import WideHeadsPlan
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace

WIDTHS = ((256, 256), (200, 200), (192, 192), (256, 64), (64, 256), (136, 136))
STEPS = ([1], [2], [3], [5])
"""Query tiles that a block visits."""

KINDS = ("OfKeys", "OfValues")


@cache
def planned(d: int = 256, dv: int = 256) -> TwoKernelsPlan:
    plan = plan_backward(Facts(), Problem(d, dv), SM100A)
    assert isinstance(plan, TwoKernelsPlan)
    return plan


def columns_of(kind: str) -> Columns:
    return planned().columns if kind == "OfKeys" else planned().value_columns


def graph(kind: str) -> Topology:
    return planned().topologies[kind]


def test_which_heads_have_two_kernels() -> None:
    for widths in WIDTHS:
        planned(*widths).check()
    for widths in ((192, 128), (136, 64)):
        assert isinstance(plan_backward(Facts(), Problem(*widths), SM100A), WideHeadsPlan)


@pytest.mark.parametrize("kind", KINDS)
def test_they_run_in_any_order(kind: str, seed: int) -> None:
    first = edges(trace(graph(kind), [4], round_robin()))
    for i, steps in enumerate((*STEPS, [9])):
        assert simulate(graph(kind), steps, at_random(seed + i)) > 0
    assert edges(trace(graph(kind), [4], at_random(seed))) == first
    nodes = lifetimes(graph(kind), columns_of(kind)).nodes
    assert all(nodes[c]["read"] for c in ((("dQ", 2), ("dK", 2)) if kind == "OfKeys" else (("dV", 2),)))


def test_products_are_issued_in_the_stated_order() -> None:
    def order(kind: str) -> str:
        events = graph(kind).role("multiply").run([3])
        return ", ".join(
            f"{e.target} {e.tile}" for e in events if e.action == "issue" and e.target[-1] != "1"
        )

    middle = "".join(f", S 0 {j}, dK {j - 1}, dQ {j - 1}, dQ late {j - 1}, dP 0 {j}" for j in (1, 2))
    assert order("OfKeys") == f"S 0 0, dP 0 0{middle}, dK 2, dQ 2, dQ late 2"
    assert order("OfValues") == "S 0 0, S 0 1, dV 0, S 0 2, dV 1, dV 2"


def test_counts_are_the_kernels() -> None:
    config = planned().config()
    for kind, table in zip(KINDS, (barrier_table(config), value_barriers(config.values)), strict=True):
        assert counts_of(table) == arrivals_of(graph(kind))


def test_barriers_that_the_kernels_do_not_have_are_not_missing() -> None:
    keys, values = (trace(graph(kind), [5], round_robin()) for kind in KINDS)
    for half, j in product((0, 1), (0, 1, 2)):
        assert ordered(keys, f"compute {half} read dP {half} tile {j}", f"product dQ tile {j}")
        assert ordered(keys, f"product dQ late tile {j}", f"write shared dS {half} tile {j + 1}")
        assert ordered(keys, f"read dQ late tile {j}", f"product S {half} tile {j + 2}")
        assert ordered(values, f"product dV tile {j}", f"product S {half} tile {j + 2}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_dropped_event_is_found(kind: str) -> None:
    """dV and dK are read by two, so that one read less leaves them read, as it does rows' numbers."""
    assert not broken(graph(kind), *STEPS)
    left = []
    found = 0
    for event, where, less in dropped(graph(kind)):
        if awaits_nothing(event, where):
            continue
        if event.action == "read" and event.target in ("dV", "dK", "lse2", "delta"):
            continue
        found += 1
        if not broken(less, *STEPS):
            left.append(f"{event} of {where}")
    assert found > 50 and not left, left


@pytest.mark.parametrize("kind", KINDS)
def test_every_wrong_count_is_found(kind: str) -> None:
    wrong = wrong_counts(graph(kind))
    assert len(wrong) > 14 and all(broken(one, *STEPS) for one in wrong)


@pytest.mark.parametrize(
    ("kind", "moved", "to"),
    [
        *(("OfKeys", *pair) for pair in (("dQ", "S 0"), ("dQ late", "V 0"), ("dS 1", "dP 0"), ("dK", "V 1"))),
        *(("OfValues", *pair) for pair in (("P 0", "S 1"), ("dV", "K 0"), ("K 1", "S 0"))),
    ],
)
def test_columns_that_live_at_once_are_not_shared(kind: str, moved: str, to: str) -> None:
    columns = columns_of(kind)
    columns = with_columns(columns, moved, next(r.first for r in columns.ranges if r.name == to))
    with pytest.raises(PlanError, match=r"while|live at once|nobody has read|before it is there"):
        pipeline = replace(graph(kind), overlaps=columns.overlaps)
        simulate(pipeline, [4], round_robin())
        lifetimes(pipeline, columns)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="registers per"):
        replace(planned(), registers=Registers(152, 136, 96)).check()


def test_turns_are_of_single_warps() -> None:
    """A quarter of what is handed on of a step's dQ, the columns of a warp, takes turns by itself."""
    config = planned().config()
    quarter = config.dq_order.size // 4
    places = [config.dq_order.place(number) for number in range(config.dq_order.size)]
    assert len(set(places)) == 64 * 256 == config.dq_order.size
    assert all(column % 128 // 32 == n // quarter for n, (_, column) in enumerate(places))


def test_a_plan_says_what_it_is() -> None:
    told = planned().explain()
    for words in ("dQ tile 0 has ended when dP 0 tile 1 begins", "a kernel of its own for dV", "v 256"):
        assert words in told
    assert planned().tile == (64, 128)
    assert max(planned().memory.total, planned().value_memory.total) <= SM100A.shared_memory
