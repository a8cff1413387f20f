"""The plan of a Blackwell backward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fa4flex.codegen.kernels.bwd_sm100.config import HALF, ROWS, Config, Registers, TensorMemory
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import Target
from fa4flex.errors import UnsupportedError

WIDTHS = (64, 128)
"""Widths that a tile in shared memory may have."""


@dataclass(frozen=True)
class BlackwellBackwardPlan:
    """A backward kernel for `problem` on `target`. head_dim, head_dim_v: as padded in shared memory."""

    target: Target
    problem: Problem
    head_dim: int
    head_dim_v: int
    registers: Registers = Registers()

    @property
    def tile(self) -> tuple[int, int]:
        """Queries per step, and keys per block."""
        return ROWS, ROWS

    @cached_property
    def columns(self) -> TensorMemory:
        dv, dprob = ROWS, ROWS + self.head_dim_v
        dk = dprob + ROWS
        return TensorMemory(0, (0, HALF), dv, dprob, (dprob, dprob + HALF), dk, dprob)

    def config(self) -> Config:
        """What the hand-written kernel is built from."""
        return Config(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            memory=self.columns,
            registers=self.registers,
            masked=self.problem.mask_form != "none",
        )


def plan_blackwell_backward(problem: Problem, target: Target) -> BlackwellBackwardPlan:
    """Raises UnsupportedError for what the kernel does not have: callers then compute it another way."""
    widths = [next((w for w in WIDTHS if w >= x), None) for x in (problem.head_dim, problem.head_dim_v)]
    head_dim, head_dim_v = widths
    if head_dim is None or head_dim_v is None or problem.lengths == "packed":
        raise UnsupportedError(
            f"a backward kernel for {problem.explain()}",
            f"dense heads of at most {WIDTHS[-1]}",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    return BlackwellBackwardPlan(target, problem, head_dim, head_dim_v)
