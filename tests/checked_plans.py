"""Plans as kernels are compiled from them: checked, the order of roles included."""

from __future__ import annotations

from typing import Any

from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.pipeline import BackwardPlan, ForwardPlan


def plan_forward(*given: Any, **options: Any) -> ForwardPlan:
    plan = dispatch.plan_forward(*given, **options)
    plan.check()
    return plan


def plan_backward(*given: Any) -> BackwardPlan:
    plan = dispatch.plan_backward(*given)
    plan.check()
    return plan
