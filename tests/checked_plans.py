"""Plans as kernels are compiled from them: checked, the order of roles included; and sizes to plan for."""

from __future__ import annotations

from typing import Any

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.pipeline import BackwardPlan, ForwardPlan
from fa4flex.kernels.plan.sizes import Sizes


def plan_forward(*given: Any, **options: Any) -> ForwardPlan:
    plan = dispatch.plan_forward(*given, **options)
    plan.check()
    return plan


def plan_backward(*given: Any, **options: Any) -> BackwardPlan:
    plan = dispatch.plan_backward(*given, **options)
    plan.check()
    return plan


def sizes_of(
    q_len: int = 5000, kv_len: int = 5000, batch: int = 1, heads: int = 64, lengths: Lengths = "dense"
) -> Sizes:
    """Sizes of a call, all of them large where nothing else is said; each head has keys of its own."""
    shape = (Shape if lengths == "dense" else Ragged)(batch, heads, q_len, kv_len)
    return Sizes(Inputs(shape, heads, 64, 64, lengths=lengths))
