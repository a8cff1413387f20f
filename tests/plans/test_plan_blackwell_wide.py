"""Plans of the Blackwell backward of heads wider than 128: the kernel's pipeline, proved and broken; maps."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from barrier_counts import counts_of
from blackwell_plans import awaits_nothing, broken, dropped, edges, ordered, refuses_columns, wrong_counts
from checked_plans import plan_backward

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.bwd_sm100.wide_heads import roles
from fa4flex.kernels.bwd_sm100.wide_heads.config import SLOPED
from fa4flex.kernels.bwd_sm100.wide_heads.plan import WideHeadsPlan
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.topology import Event
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace

WIDTHS = ((192, 128), (192, 32), (160, 128), (160, 96))
STEPS = ([1], [2], [5])
"""Query tiles that a CTA visits."""


@cache
def planned(d: int = 192, dv: int = 128, sloped: bool = False) -> WideHeadsPlan:
    plan = plan_backward(Facts(), Problem(d, dv, sloped=sloped), SM100A)
    assert isinstance(plan, WideHeadsPlan)
    return plan


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_plan_runs(widths: tuple[int, int], seed: int) -> None:
    plan = planned(*widths)
    plan.check()
    for i, steps in enumerate((*STEPS, [9])):
        assert simulate(plan.topology, steps, at_random(seed + i)) > 0
    nodes = lifetimes(plan.topology, plan.columns).nodes
    assert all(nodes[c]["read"] for c in (("dQ", 2), ("dQ late", 2), ("dV", 2)))


def test_one_run_stands_for_all(seed: int) -> None:
    pipeline = planned().topology
    first = edges(trace(pipeline, [3], round_robin()))
    assert len(first) > 400
    assert edges(trace(pipeline, [3], at_random(seed))) == first


def test_products_are_issued_in_the_stated_order() -> None:
    events = planned().topology.role("multiply").run([3])
    order = [f"{e.target} {e.tile}" for e in events if e.action == "issue" and " 1" not in e.target]
    names = ("S 0 0", "dP 0 0", "dV", "dK", "dQ", "dQ late")
    assert order == [f"{name} {j}" for j in range(3) for name in names]


def test_counts_are_the_kernels() -> None:
    plan = planned()
    pipeline = plan.topology
    table = roles.barrier_table(plan.config())
    counts = counts_of(table)
    assert counts == arrivals_of(pipeline)
    assert counts["p_full"] == counts["ds_full"] == 8 and counts["dq_empty"] == 4 and counts["k full"] == 1
    assert counts["s_read"] == 8 and counts["dq_begun"] == 4
    for named in table.named:
        here = [r for r in pipeline.roles if r.uses("sync", named.name) or r.uses("give", named.name)]
        assert sum(32 * role.warps for role in here) == named.threads


def test_barriers_that_the_kernel_does_not_have_are_not_missing() -> None:
    run = trace(planned().topology, [4], round_robin())
    for half, i, j in product((0, 1), (0, 1), (0, 1, 2)):
        assert ordered(run, f"read S {half} {i} tile {j}", f"product dP 0 0 tile {j}")
        assert ordered(run, f"product dV tile {j}", f"product S {half} {i} tile {j + 1}")
        assert ordered(run, f"product dK tile {j}", f"product dQ tile {j}")
        assert ordered(run, f"product dQ late tile {j}", f"write shared dS {half} tile {j + 1}")
        assert ordered(run, f"read dQ late tile {j}", f"product dP {half} {i} tile {j + 1}")


@pytest.mark.parametrize("sloped", (False, True))
def test_every_dropped_event_is_found(sloped: bool) -> None:
    """dV and dK are read by two, so that one read less leaves them read."""
    pipeline = planned(sloped=sloped).topology
    assert not broken(pipeline, *STEPS)
    every = [x for x in dropped(pipeline) if matters(*x[:2])]
    assert len(every) > 130
    for event, where, less in every:
        assert broken(less, *STEPS), f"{event} of {where}"


def matters(event: Event, where: str) -> bool:
    """Values are waited for anew in each step."""
    if awaits_nothing(event, where) or (event.target == "v" and where.endswith("body")):
        return False
    return event.action != "read" or event.target not in ("dV", "dK", "lse2", "delta")


def test_wrong_counts_are_found() -> None:
    wrong = wrong_counts(planned().topology)
    assert len(wrong) > 35 and all(broken(one, *STEPS) for one in random.sample(wrong, 20))


SHARED = (("dQ", "dV"), ("dK", "dP 0 0"), ("P 0 0", "S 1 0"), ("P 1 1", "dP 0 0"), ("dS 1 0", "dP 0 0"))


@pytest.mark.parametrize(("moved", "to"), SHARED)
def test_columns_that_live_at_once_are_not_shared(moved: str, to: str) -> None:
    """P(j) and dP(j), say, which is multiplied while probabilities are made."""
    refuses_columns(planned(), moved, to)


def test_all_of_both_memories_is_used() -> None:
    plan = planned()
    assert {c for r in plan.columns.ranges for c in range(r.first, r.end)} == set(range(512))
    assert SM100A.shared_memory - plan.memory.total < 2048


def test_turns_are_of_single_warps() -> None:
    """A quarter of what is handed on of a step's dQ lies in the rows that take turns by themselves."""
    config = planned().config()
    quarter = config.dq_order.size // 4
    for number in range(config.dq_order.size):
        row, _ = config.dq_order.place(number)
        assert row // config.turn_rows == number // quarter


def test_what_every_kernel_has() -> None:
    """Lengths, masks, ordered sums and captured gradients are those of narrower heads."""
    wide = Problem(136, 40, lengths="packed", mask_form="tables", deterministic=True, gradients=((0, "sum"),))
    plan = plan_backward(Facts(), wide, SM100A)
    config = plan.config()
    assert (config.head_dim, config.head_dim_v) == (160, 64) and plan.tile == (128, 128)
    assert config.ragged and config.masked and config.deterministic
    assert plan_backward(Facts(), replace(wide, sloped=True), SM100A).config().registers == SLOPED
