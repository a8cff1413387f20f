"""The plan of a Blackwell backward kernel of single CTAs. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_sm100.config import HALF, ROWS
from fa4flex.kernels.bwd_sm100.plan import BlackwellBackwardPlan, padded
from fa4flex.kernels.bwd_sm100.topology import HALVES, backward_topology
from fa4flex.kernels.plan.pipeline import EVERY, Pipeline
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology

WIDTHS = (32, 64, 96, 128)
"""Widths that a tile in shared memory may have."""


@dataclass(frozen=True)
class OneCtaPlan(BlackwellBackwardPlan):
    """A backward kernel for `problem` on `target`, in which each CTA has a tile of keys."""

    module: ClassVar[str] = "fa4flex.kernels.bwd_sm100"

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a block: scores, dV, dP and dK. Probabilities lie over scores and dS over
        dP, two in a column, at the start of each half of the queries; dQ lies over dP."""
        dv, dprob = ROWS, ROWS + self.head_dim_v
        halves = [
            Range(f"{name} {i}", first + i * HALF, count)
            for name, first, count in (
                ("S", 0, HALF),
                ("P", 0, HALF // 2),
                ("dP", dprob, HALF),
                ("dS", dprob, HALF // 2),
            )
            for i in HALVES
        ]
        sums = (
            Range("dV", dv, self.head_dim_v),
            Range("dK", dprob + ROWS, self.head_dim),
            Range("dQ", dprob, self.head_dim),
        )
        return Columns((*halves, *sums), self.target.tensor_columns)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        return backward_topology(self.config(), self.columns, self.problem.itemsize)


def plan_one_cta(request: Request) -> OneCtaPlan:
    """Raises UnsupportedError for what the kernel does not have: callers then compute it another way."""
    problem = request.problem
    head_dim, head_dim_v = padded(problem, WIDTHS)
    if head_dim is None or head_dim_v is None:
        raise UnsupportedError(
            f"a backward kernel for {problem.explain()}",
            f"heads of at most {WIDTHS[-1]}",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    return OneCtaPlan(request.target, problem, head_dim, head_dim_v)


ONE_CTA = Pipeline(
    "Blackwell backward",
    "backward",
    lambda problem, target, sizes: target.family == "sm100" and not problem.entropy,
    plan_one_cta,
    drops=True,
    weights=EVERY,
)
