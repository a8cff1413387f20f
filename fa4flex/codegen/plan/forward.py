"""Plan: everything about a kernel that is decided before any of its code is written. Data only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.plan.bound import Bound, Size
from fa4flex.codegen.plan.memory import Memory
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.request import Order, Request
from fa4flex.codegen.plan.sm90.plan import plan_hopper
from fa4flex.codegen.plan.sm100.plan import plan_blackwell
from fa4flex.codegen.plan.target import SM90A, Target
from fa4flex.primitives.schedule import Schedule


class Plan(Protocol):
    """A forward kernel for `problem` on `target`."""

    @property
    def target(self) -> Target: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys that a block multiplies at once."""
        ...

    @property
    def order(self) -> Order:
        """Of tiles of queries."""
        ...

    @property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        ...

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        ...

    def config(self) -> Any:
        """What the hand-written kernel is built from."""
        ...

    def check(self) -> None:
        """PlanError or UnsupportedError unless the plan holds."""
        ...

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        ...


PLANNERS: dict[str, Callable[[Request], Plan]] = {"sm90": plan_hopper, "sm100": plan_blackwell}
"""By family of targets."""


def plan_forward(
    facts: Facts,
    problem: Problem,
    target: Target = SM90A,
    schedule: Schedule = Schedule(),
    rescale_threshold: float | None = None,
) -> Plan:
    """Facts, problem and chip -> a checked Plan.

    `rescale_threshold` t is in log2 units. The softmax may use a maximum that lags behind the true one, which
    is the idea of FlashAttention-4's conditional rescaling. Here it is raised only where some score of a
    warp's rows passes a ceiling, the maximum in use + t: most tiles then need neither a reduction over lanes
    nor a rescaling. Probabilities are at most 2^t instead of 1, and the final division undoes it. t = 8 is
    safe for both dtypes that hold probabilities: 2^8 is far below float16's 65504, bfloat16 has float32's
    range, both keep their relative precision, small probabilities only move away from underflow, and sums
    are float32. None means RESCALE, and 0 where `max_scores` is asked for: then the maximum in use must be
    the true one.

    Raises UnsupportedError for what the chip or kernel does not have, InputError where facts and problem
    contradict each other.
    """
    request = Request.of(facts, problem, target, schedule, rescale_threshold)
    plan = PLANNERS[target.family](request)
    plan.check()
    return plan
