"""The plan of a Blackwell backward kernel of heads wider than 128. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_sm100 import config as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, HALF
from fa4flex.kernels.bwd_sm100.one_cta import plan as one_cta
from fa4flex.kernels.bwd_sm100.plan import BlackwellBackwardPlan, padded
from fa4flex.kernels.bwd_sm100.topology import HALVES
from fa4flex.kernels.bwd_sm100.wide_heads.config import (
    EARLY,
    FRAGMENTS,
    PACKED,
    SLOPED,
    SPLIT,
    TURNS,
    Config,
    Registers,
)
from fa4flex.kernels.bwd_sm100.wide_heads.roles import barrier_table
from fa4flex.kernels.bwd_sm100.wide_heads.topology import wide_topology
from fa4flex.kernels.plan.pipeline import EVERY, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology

WIDTHS = (160, 192)
"""Widths that a tile of Q or K in shared memory may have; of V, those of narrower heads."""


@dataclass(frozen=True)
class WideHeadsPlan(BlackwellBackwardPlan):
    """A backward kernel for `problem` on `target`, of wide heads."""

    registers: Registers = SPLIT

    module: ClassVar[str] = "fa4flex.kernels.bwd_sm100.wide_heads"

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

    def barriers(self, config: base.Config) -> int:
        return barrier_table(config).count

    @cached_property
    def topology(self) -> Topology:
        problem = self.problem
        return wide_topology(self.config(), self.columns, problem.itemsize, problem.sloped)


def plan_wide_heads(request: Request) -> WideHeadsPlan:
    """Raises UnsupportedError for what no kernel has: callers then compute it another way."""
    problem = request.problem
    (head_dim, _), (_, head_dim_v) = padded(problem, WIDTHS), padded(problem, one_cta.WIDTHS)
    if head_dim is None or head_dim_v is None:
        raise UnsupportedError(
            f"a backward kernel for {problem.explain()}",
            f"heads of at most {WIDTHS[-1]}, and {one_cta.WIDTHS[-1]} of v: tensor memory holds dV and dK"
            f" beside {TURNS} columns in which all else takes turns",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    registers = SLOPED if problem.sloped else SPLIT
    return WideHeadsPlan(request.target, problem, head_dim, head_dim_v, registers)


def _wide(problem: Problem, target: Target, sizes: Sizes) -> bool:
    widest = max(problem.head_dim, problem.head_dim_v)
    return target.family == "sm100" and widest > one_cta.WIDTHS[-1]


WIDE_HEADS = Pipeline(
    "Blackwell backward of wide heads",
    "backward",
    _wide,
    plan_wide_heads,
    drops=True,
    weights=EVERY,
)
