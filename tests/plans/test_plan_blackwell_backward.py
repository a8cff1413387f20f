"""Plans of the Blackwell backward: the kernel's pipeline, proved and broken; memory; registers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from barrier_counts import counts_of
from blackwell_plans import broken, dropped, edges, ordered, refuses_columns, wrong_counts
from checked_plans import plan_backward

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.bwd_sm100 import roles
from fa4flex.kernels.bwd_sm100.config import Registers
from fa4flex.kernels.bwd_sm100.one_cta.plan import OneCtaPlan
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace

WIDTHS = ((32, 32), (64, 64), (64, 128), (96, 96), (128, 32), (128, 128))
STEPS = ([1], [2], [5])
"""Query tiles that a CTA visits."""


@cache
def planned(d: int = 128, dv: int = 128) -> OneCtaPlan:
    plan = plan_backward(Facts(), Problem(d, dv), SM100A)
    assert isinstance(plan, OneCtaPlan)
    return plan


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_plan_runs(widths: tuple[int, int], seed: int) -> None:
    plan = planned(*widths)
    plan.check()
    for i, steps in enumerate((*STEPS, [9])):
        assert simulate(plan.topology, steps, at_random(seed + i)) > 0
    assert all(lifetimes(plan.topology, plan.columns).nodes[c]["read"] for c in (("dQ", 2), ("dV", 2)))


def test_one_run_stands_for_all(seed: int) -> None:
    """Whatever order steps are picked in, the same steps happen, after the same hand-overs."""
    pipeline = planned().topology
    first = edges(trace(pipeline, [3], round_robin()))
    assert len(first) > 300
    for i in range(4):
        assert edges(trace(pipeline, [3], at_random(seed + i))) == first


def test_products_are_issued_in_the_stated_order() -> None:
    events = planned().topology.role("multiply").run([3])
    order = [f"{e.target} {e.tile}" for e in events if e.action == "issue" and e.target[-1] != "1"]
    begin = "S 0 0, dP 0 0, dV 0"
    middle = "".join(f", S 0 {j}, dK {j - 1}, dQ {j - 1}, dP 0 {j}, dV {j}" for j in (1, 2))
    assert order == f"{begin}{middle}, dK 2, dQ 2".split(", ")


def test_counts_are_the_kernels() -> None:
    plan = planned()
    pipeline = plan.topology
    table = roles.barrier_table(plan.config())
    counts = counts_of(table)
    assert counts == arrivals_of(pipeline)
    assert counts["p_full"] == counts["ds_full"] == 8 and counts["dq_empty"] == 4 and counts["k full"] == 1
    for named in table.named:
        here = [r for r in pipeline.roles if r.uses("sync", named.name) or r.uses("give", named.name)]
        assert sum(32 * role.warps for role in here) == named.threads


def test_barriers_that_the_kernel_does_not_have_are_not_missing() -> None:
    run = trace(planned().topology, [4], round_robin())
    for half, j in product((0, 1), (0, 1, 2)):
        assert ordered(run, f"compute {half} read S {half} tile {j}", f"product S {half} tile {j + 1}")
        assert ordered(run, f"product dV tile {j}", f"product S {half} tile {j + 1}")
        for name in ("dK", "dQ"):
            assert ordered(run, f"product {name} tile {j}", f"write shared dS {half} tile {j + 1}")
        assert ordered(run, f"read dQ tile {j}", f"product dP {half} tile {j + 1}")


def test_every_dropped_event_is_found() -> None:
    """dV and dK are read by two, so that one read less leaves them read."""
    pipeline = planned().topology
    assert not broken(pipeline, *STEPS)
    found = 0
    for event, where, less in dropped(pipeline):
        if event.action != "read" or event.target not in ("dV", "dK", "lse2", "delta"):
            assert broken(less, *STEPS), f"{event} of {where}"
            found += 1
    assert found > 100


def test_every_wrong_count_is_found() -> None:
    wrong = wrong_counts(planned().topology)
    assert len(wrong) > 30 and all(broken(one, *STEPS) for one in wrong)


SHARED = (("dQ", "S 0"), ("dQ", "dV"), ("dK", "dP 0"), ("P 0", "S 1"), ("dS 1", "dP 0"))


@pytest.mark.parametrize(("moved", "to"), SHARED)
def test_columns_that_live_at_once_are_not_shared(moved: str, to: str) -> None:
    """dQ(j) and S(j + 1), say: the one is read while the other is made into probabilities."""
    refuses_columns(planned(), moved, to)


@pytest.mark.parametrize(
    "registers",
    [Registers(152, 136, 96), Registers(104, 160, 132), Registers(136, 144, 88), Registers(80, 120, 88)],
)
def test_registers_that_are_not_there(registers: Registers) -> None:
    with pytest.raises(PlanError, match="registers per"):
        replace(planned(), registers=registers).check()


@pytest.mark.parametrize("width", (32, 64, 96, 128))
def test_turns_are_of_single_warps(width: int) -> None:
    """A quarter of what is handed on of a step's dQ lies in the rows that take turns by themselves."""
    config = planned(width, width).config()
    quarter = config.dq_order.size // 4
    for number in range(config.dq_order.size):
        row, _ = config.dq_order.place(number)
        assert row // config.turn_rows == number // quarter


def test_a_plan_says_what_it_is() -> None:
    told = planned(64, 64).explain()
    for words in ("backward kernel for sm_100a", "dQ tile 0 has ended when dP 0 tile 1 begins", "k: 1 stage"):
        assert words in told
    ordered = plan_backward(Facts(), Problem(64, 64, lengths="packed", deterministic=True), SM100A)
    assert ordered.config().ragged and "awaits its turn" in ordered.explain()  # type: ignore[attr-defined]
    narrow, whole = planned(40, 64).config(), planned(64, 64).config()
    assert narrow.depths == (3, 4) and narrow == replace(whole, depths=(3, 4))
    assert planned().memory.total <= SM100A.shared_memory
    assert planned().config().masked is False and planned().tile == (128, 128)
    assert plan_backward(Facts(), Problem(64, 64, mask_form="tables"), SM100A).config().masked
