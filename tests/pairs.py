"""Backward passes by pairs of CTAs where the planner would take one CTA alone: tests have few keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from fa4flex.codegen.plan.request import Request
from fa4flex.kernels import dispatch
from fa4flex.kernels.bwd_sm100.two_cta.plan import TWO_CTA, TwoCtaPlan, plan_two_cta
from fa4flex.runtime.cuda import engine


@contextlib.contextmanager
def in_pairs() -> Iterator[None]:
    """Whatever the kernel of pairs has, and something must be; what is made ready is not kept for others."""
    look, this = engine.Engine.look, object()
    planned: list[TwoCtaPlan] = []

    def of_pairs(self: engine.Engine, call: Any) -> Any:
        found = look(self, call)
        return None if found is None else ((this, *found[0]), found[1])

    def noted(request: Request) -> TwoCtaPlan:
        planned.append(plan_two_cta(request))
        return planned[-1]

    always = replace(TWO_CTA, accepts=lambda problem, target: target.family == "sm100", plan=noted)
    with (
        patch.object(dispatch, "PIPELINES", (always, *dispatch.PIPELINES)),
        patch.object(engine.Engine, "look", of_pairs),
    ):
        yield
    assert planned, "no backward pass by pairs of CTAs was planned"
