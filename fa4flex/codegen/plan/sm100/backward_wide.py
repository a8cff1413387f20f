"""The plan of a Blackwell backward kernel of heads wider than 128. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fa4flex.codegen.kernels.bwd_sm100 import config as alone
from fa4flex.codegen.kernels.bwd_sm100.config import FRAGMENT, HALF
from fa4flex.codegen.kernels.bwd_sm100_wide.config import (
    EARLY,
    FRAGMENTS,
    PACKED,
    SLOPED,
    SPLIT,
    TURNS,
    Config,
    Registers,
)
from fa4flex.codegen.kernels.bwd_sm100_wide.roles import barrier_total
from fa4flex.codegen.plan.pipeline import Pipeline
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.sm100 import backward
from fa4flex.codegen.plan.sm100.backward import BlackwellBackwardPlan, padded
from fa4flex.codegen.plan.sm100.backward_pipeline import HALVES
from fa4flex.codegen.plan.sm100.backward_wide_pipeline import wide_pipeline
from fa4flex.codegen.plan.sm100.tensor_memory import Columns, Range
from fa4flex.codegen.plan.target import Target
from fa4flex.errors import UnsupportedError

WIDTHS = (160, 192)
"""Widths that a tile of Q or K in shared memory may have; of V, those of narrower heads."""


@dataclass(frozen=True)
class BlackwellWidePlan(BlackwellBackwardPlan):
    """A backward kernel for `problem` on `target`, of wide heads."""

    registers: Registers = SPLIT

    folder = "bwd_sm100_wide"
    """Of kernels/."""

    kind = Config

    part = " 0"

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a block: dV and dK, and the columns in which all else takes turns. A
        compute warpgroup has every other fragment of queries. All probabilities, two in a column, lie over
        the first half of the scores, and dP over the second; dS lie at the start of their dP, and dQ over
        everything."""
        turns = self.target.tensor_columns - TURNS
        fragments = [
            Range(f"{name} {half} {i}", first + half * FRAGMENT + i * apart, count)
            for name, first, apart, count in (
                ("S", turns, HALF, FRAGMENT),
                ("P", turns, PACKED, PACKED),
                ("dP", turns + HALF, HALF, FRAGMENT),
                ("dS", turns + HALF, HALF, PACKED),
            )
            for half in HALVES
            for i in range(FRAGMENTS)
        ]
        sums = (
            Range("dV", 0, self.head_dim_v),
            Range("dK", self.head_dim_v, self.head_dim),
            Range("dQ", turns, EARLY),
            Range("dQ late", turns + EARLY, self.head_dim - EARLY),
        )
        return Columns((*fragments, *sums), self.target.tensor_columns)

    def barriers(self, config: alone.Config) -> int:
        return barrier_total(config.q_stages, config.do_stages)

    @cached_property
    def pipeline(self) -> Pipeline:
        problem = self.problem
        return wide_pipeline(self.config(), self.columns, problem.itemsize, problem.sloped)


def plan_wide(problem: Problem, target: Target) -> BlackwellWidePlan:
    """Raises UnsupportedError for what no kernel has: callers then compute it another way."""
    (head_dim, _), (_, head_dim_v) = padded(problem, WIDTHS), padded(problem, backward.WIDTHS)
    if head_dim is None or head_dim_v is None:
        raise UnsupportedError(
            f"a backward kernel for {problem.explain()}",
            f"heads of at most {WIDTHS[-1]}, and {backward.WIDTHS[-1]} of v: tensor memory holds dV and dK"
            f" beside {TURNS} columns in which all else takes turns",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    registers = SLOPED if problem.sloped else SPLIT
    plan = BlackwellWidePlan(target, problem, head_dim, head_dim_v, registers)
    plan.check()
    return plan
