"""One attention over many ranks of torch.distributed, its sequence spread over them: docs/parallel.md."""

from __future__ import annotations

from fa4flex.parallel.context import ContextParallel, parallel
from fa4flex.parallel.exchange import Exchange
from fa4flex.parallel.placement import Placement
from fa4flex.parallel.plan import Layout, Plan, plan

__all__ = ["ContextParallel", "Exchange", "Layout", "Placement", "Plan", "parallel", "plan"]
