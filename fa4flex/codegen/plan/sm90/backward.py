"""The plan of a Hopper backward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.codegen.kernels.bwd_sm90.config import Config
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.sm90.tiles import pad
from fa4flex.codegen.plan.target import Target
from fa4flex.errors import UnsupportedError

WIDEST = 128
TILE = (64, 128)
WIDE_TILE = (128, 128)
"""Where registers hold 128 queries, operands are read from shared memory less often: narrow heads without
slopes or captured gradients, which take more."""


@dataclass(frozen=True)
class HopperBackwardPlan:
    """A backward kernel for `problem` on `target`. tile: queries per step, and keys per block."""

    target: Target
    problem: Problem
    tile: tuple[int, int]
    head_dim: int
    head_dim_v: int

    def config(self) -> Config:
        """What the hand-written kernel is built from."""
        tile_m, tile_n = self.tile
        return Config(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            tile_m=tile_m,
            tile_n=tile_n,
            masked=self.problem.mask_form != "none",
            lengths=self.problem.lengths,
            deterministic=self.problem.deterministic,
        )


def plan_hopper_backward(problem: Problem, target: Target) -> HopperBackwardPlan:
    """Raises UnsupportedError for what the kernel does not have: callers then compute it another way."""
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    if max(widths) > WIDEST or 96 in widths:
        raise UnsupportedError(
            f"a backward kernel for {problem.explain()}",
            "heads of at most 64 or of 97 to 128",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    roomy = max(widths) <= 64 and not problem.sloped and not problem.gradients
    return HopperBackwardPlan(target, problem, WIDE_TILE if roomy else TILE, *widths)
