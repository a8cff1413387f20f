"""Plan: facts, shapes and a chip's limits become tiles, roles, memory and a pipeline; data only."""

from fa4flex.codegen.plan.bound import Bound, Size
from fa4flex.codegen.plan.fault import PlanError
from fa4flex.codegen.plan.forward import Plan, plan_forward
from fa4flex.codegen.plan.memory import Memory, Region
from fa4flex.codegen.plan.pipeline import Barrier, Event, NamedBarrier, Pipeline, Product, Ring, Role
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.sm90.plan import HopperPlan
from fa4flex.codegen.plan.sm90.registers import Need, Split
from fa4flex.codegen.plan.sm90.tiles import Tiles
from fa4flex.codegen.plan.sm100.plan import BlackwellPlan
from fa4flex.codegen.plan.target import SM90A, SM100A, Target
from fa4flex.codegen.plan.work import Bias, Work

__all__ = [
    "SM90A",
    "SM100A",
    "Barrier",
    "Bias",
    "BlackwellPlan",
    "Bound",
    "Event",
    "HopperPlan",
    "Memory",
    "NamedBarrier",
    "Need",
    "Pipeline",
    "Plan",
    "PlanError",
    "Problem",
    "Product",
    "Region",
    "Ring",
    "Role",
    "Size",
    "Split",
    "Target",
    "Tiles",
    "Work",
    "plan_forward",
]
