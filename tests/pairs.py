"""Backward passes by pairs of CTAs where the planner would take one CTA alone: tests have few keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from fa4flex.codegen.plan.sm100 import backward_pair
from fa4flex.runtime.cuda import backward, engine


@contextlib.contextmanager
def in_pairs() -> Iterator[None]:
    """Whatever the kernel of pairs has, and something must be; what is made ready is not kept for others."""
    key, plan_pairs, this = engine.Engine.key, backward_pair.plan_pairs, object()
    planned: list[backward_pair.BlackwellPairPlan] = []

    def of_pairs(self: engine.Engine, *call: Any) -> Any:
        return this, key(self, *call)

    def noted(*given: Any) -> backward_pair.BlackwellPairPlan:
        planned.append(plan_pairs(*given))
        return planned[-1]

    with (
        patch.object(backward_pair, "pays_in_pairs", lambda problem: True),
        patch.object(backward_pair, "plan_pairs", noted),
        patch.object(backward, "program", backward.program.__wrapped__),
        patch.object(engine.Engine, "key", of_pairs),
    ):
        yield
    assert planned, "no backward pass by pairs of CTAs was planned"
