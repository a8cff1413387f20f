"""Plans of kernels that may leave out tiles of keys: pipelines in any order of events, words, and those of
kernels that leave out nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import eight_bit, in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import UNKNOWN
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Event, Topology
from fa4flex.kernels.plan.verify import at_random, prove, simulate

SKIP = 1e-3
FORWARD = {"many": {}, "packed": {"lengths": "packed"}, "pages": {"lengths": "used", "keys": in_pages(64)}}


def planned(target: Any = SM90A, skip: float = SKIP, **more: Any) -> Any:
    problem = Problem(128, 128, skip=skip, **more)
    return dispatch.plan_forward(Facts(), problem, target, sizes=UNKNOWN)


def few(target: Any, **more: Any) -> Any:
    """The plan of few rows, whatever sizes say."""
    from fa4flex.kernels.plan.request import ForwardRequest

    problem = Problem(128, 128, skip=SKIP, **more)
    name = "decode_fp8_sm90" if problem.keys.dtype else f"decode_{target.family}"
    (entry,) = [
        one for one in dispatch.loaded("forward") if one.plan.__module__ == f"fa4flex.kernels.{name}.plan"
    ]
    return entry.plan(ForwardRequest(Facts(), problem, target))


@pytest.mark.parametrize("kind", FORWARD)
def test_any_order_of_events(kind: str, seed: int) -> None:
    topology: Topology = planned(**FORWARD[kind]).topology
    prove(topology)
    for one in (topology, topology.least):
        for order in range(3):
            simulate(one, [1, 5], at_random(seed + order))


def test_any_order_of_events_of_few_rows(seed: int) -> None:
    topology: Topology = few(SM90A).topology
    prove(topology)
    for one in (topology, topology.least):
        for tiles in (1, 2, 9):
            for order in range(3):
                simulate(one, [tiles], at_random(seed + order))


@pytest.mark.parametrize(
    "role, missing", [("consumer", Event("fill", "asked")), ("producer", Event("wait", "asked"))]
)
def test_what_is_not_told_is_found(role: str, missing: Event) -> None:
    topology: Topology = few(SM90A).topology

    def without(events: tuple[Event, ...]) -> tuple[Event, ...]:
        return tuple(e for e in events if (e.action, e.target) != (missing.action, missing.target))

    roles = tuple(
        replace(r, first=without(r.first), body=without(r.body)) if r.name == role else r
        for r in topology.roles
    )
    with pytest.raises(PlanError):
        prove(replace(topology, roles=roles))


def test_values_that_are_let_go_of_early_are_found() -> None:
    """A consumer that frees values before their product has read them."""
    topology: Topology = planned().topology
    roles = []
    for role in topology.roles:
        if role.kind == "consumer":
            body = [e for e in role.body if (e.action, e.target) != ("finish", "O")]
            role = replace(role, body=tuple(body))
        roles.append(role)
    with pytest.raises(PlanError):
        prove(replace(topology, roles=tuple(roles)))


def test_explain_says_what_is_left_out() -> None:
    for plan in (planned(), few(SM90A), planned(SM100A)):
        assert "log(n / 0.001)" in plan.explain()
    for plan in (planned(skip=0.0), planned(SM100A, skip=0.0)):
        assert "left out" not in plan.explain() and "skip" not in plan.explain()


@pytest.mark.parametrize(
    "target, more",
    [
        (SM100A, {}),
        (SM90A, {"lengths": "used", "keys": in_pages(64)}),
        (SM90A, {"lengths": "used", "keys": eight_bit(0, "head", "head")}),
    ],
)
def test_kernels_that_leave_out_nothing_say_so(target: Any, more: dict[str, Any]) -> None:
    plan = few(target, **more)
    assert plan.skip == 0 and "leaves out no tile of keys for skip=0.001" in plan.explain()
    plan.check()


def test_mixed_batches_take_the_kernel_for_many_rows() -> None:
    more: dict[str, Any] = {"lengths": "packed", "keys": in_pages(64)}
    assert planned(**more).module.endswith("fwd_sm90")
    assert planned(**more, skip=0.0).module.endswith("mixed_sm90")


def test_backward_passes_leave_out_nothing() -> None:
    from fa4flex.kernels.plan.specialize import backward_problem

    assert backward_problem(Problem(64, 64, skip=SKIP), Facts(), False).skip == 0
    assert fa4flex.Precision(skip=SKIP).skip == SKIP
