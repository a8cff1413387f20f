"""One attention over many ranks of torch.distributed, its sequence spread over them: docs/parallel.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fa4flex.parallel.context import ContextParallel, parallel
from fa4flex.parallel.exchange import Exchange
from fa4flex.parallel.placement import Placement
from fa4flex.parallel.plan import Layout, Plan, plan

if TYPE_CHECKING:
    from fa4flex.parallel.style import SequenceParallelAttention

__all__ = [
    "ContextParallel",
    "Exchange",
    "Layout",
    "Placement",
    "Plan",
    "SequenceParallelAttention",
    "parallel",
    "plan",
]


def __getattr__(name: str) -> Any:
    """The style, whose module loads torch's DTensor: a second that others need not wait."""
    if name == "SequenceParallelAttention":
        from fa4flex.parallel.style import SequenceParallelAttention

        return SequenceParallelAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
