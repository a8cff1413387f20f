"""The plan of a Hopper backward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.codegen.kernels.bwd_sm90.config import Config
from fa4flex.codegen.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.sm90.tiles import pad
from fa4flex.codegen.plan.target import Target

KEYS_APART = 128
"""The widest heads of which warpgroups have keys of their own: of wider ones, the sums of 64 keys take more
registers than a warpgroup has, and warpgroups share out columns."""

TILE = (64, 128)
ROOMY_TILE = (128, 128)
"""Where registers hold 128 queries, operands are read from shared memory less often: narrow heads without
slopes or captured gradients, which take more."""

WIDE_TILE = (64, 64)
STAGES = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
"""Tiles of Q, dO and dQ in flight, best first; shared memory decides."""


@dataclass(frozen=True)
class HopperBackwardPlan:
    """A backward kernel for `problem` on `target`. tile: queries per step, and keys per block; stages: tiles
    of Q, dO and dQ in flight."""

    target: Target
    problem: Problem
    tile: tuple[int, int]
    head_dim: int
    head_dim_v: int
    stages: tuple[int, int, int]
    copies: ClassVar[bool] = True
    """Whether its kernel copies tiles of dS to gradients of captured tensors that are dS."""

    ctas = 1
    """That have a tile of keys."""

    @property
    def wide(self) -> bool:
        return max(self.head_dim, self.head_dim_v) > KEYS_APART

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        (m, n), (q_stages, do_stages, dq_stages) = self.tile, self.stages
        size, d, dv = self.problem.itemsize, self.head_dim, self.head_dim_v
        scores = 2 * tile_bytes(m, n, size)
        sizes = {
            "lse2": NUMBER * m * q_stages,
            "delta": NUMBER * m * do_stages,
            "q": tile_bytes(m, d, size) * q_stages,
            "dout": tile_bytes(m, dv, size) * do_stages,
            "k": tile_bytes(n, d, size),
            "v": tile_bytes(n, dv, size),
            "ds": scores,
            "p": scores if self.wide else 0,
            "dq": tile_bytes(m, d, NUMBER) * dq_stages,
        }
        return lay_out(sizes, {}, 2 * (q_stages + do_stages + 1), self.target)

    def config(self) -> Config:
        """What the hand-written kernel is built from."""
        (tile_m, tile_n), (q_stages, do_stages, dq_stages) = self.tile, self.stages
        return Config(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            tile_m=tile_m,
            tile_n=tile_n,
            split="columns" if self.wide else "keys",
            q_stages=q_stages,
            do_stages=do_stages,
            dq_stages=dq_stages,
            masked=self.problem.mask_form != "none",
            lengths=self.problem.lengths,
            deterministic=self.problem.deterministic,
        )


def plan_hopper_backward(problem: Problem, target: Target) -> HopperBackwardPlan:
    """Raises UnsupportedError for what the kernel does not have: callers then compute it another way."""
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    roomy = max(widths) <= 64 and not problem.sloped and not problem.gradients
    tile = ROOMY_TILE if roomy else TILE if max(widths) <= KEYS_APART else WIDE_TILE
    plans = [HopperBackwardPlan(target, problem, tile, *widths, stages) for stages in STAGES]
    plan = next((p for p in plans if p.memory.total <= target.shared_memory), plans[-1])
    plan.memory.check()
    return plan
