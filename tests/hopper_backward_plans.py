"""Plans of the Hopper backward for tests, and sizes at which they differ."""

from __future__ import annotations

from unittest.mock import patch

from checked_plans import plan_backward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.bwd_sm90 import plan as planner
from fa4flex.kernels.bwd_sm90.plan import HopperBackwardPlan
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM90A

WIDTHS = (32, 64, 80, 96, 128, 192, 256)
LIGHT = Problem(128, 128, mask_form="queries")

LARGE = sizes_of()
FEW_KEYS, FEW_STEPS = sizes_of(kv_len=128), sizes_of(512)
FEW_TILES = sizes_of(kv_len=33 * 128, heads=2)
"""33 tiles of each head: half of the multiprocessors are 66."""

BY_DS = ("dK rows 0", "shared dS 0")
"""Overlap of a plan in which dK leaves by the memory of dS."""


def planned(problem: Problem, paired: int = 0, sizes: Sizes = LARGE) -> HopperBackwardPlan:
    """The plan where CTAs come in pairs for heads up to `paired` wide."""
    with patch.object(planner, "PAIRED", paired):
        plan = plan_backward(Facts(), problem, SM90A, sizes=sizes)
    assert isinstance(plan, HopperBackwardPlan)
    return plan
