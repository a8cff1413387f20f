"""The plan of a Hopper kernel for sums per key. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.bwd_sm90.config import KEYS
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.mass_sm90.config import Config
from fa4flex.kernels.mass_sm90.roles import barrier_table
from fa4flex.kernels.mass_sm90.topology import mass_topology
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import Checked, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology

TILE = (128, 128)
SHORT_TILE = (64, 128)
"""Tiles of queries and keys; the latter where scores or masks take registers."""

STAGES = (3, 2)
"""Tiles of Q in flight, best first; shared memory decides."""

TOGETHER, FEW_TOGETHER = 16, 4
"""Columns turned into probabilities together; the latter where scores take registers."""


@dataclass(frozen=True)
class MassPlan(Checked):
    """A kernel for `problem` on `target`. tile: queries per step, and keys per block; head_dim: of the tiles
    in shared memory; stages: tiles of Q in flight."""

    target: Target
    problem: Problem
    tile: tuple[int, int]
    head_dim: int
    stages: int

    module: ClassVar[str] = "fa4flex.kernels.mass_sm90"
    copies: ClassVar[bool] = False

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        (m, n), size = self.tile, self.problem.itemsize
        sizes = {
            "lse2": NUMBER * m * self.stages,
            "q": tile_bytes(m, self.head_dim, size) * self.stages,
            "k": tile_bytes(n, self.head_dim, size),
        }
        return lay_out(sizes, {}, barrier_table(self.config()).count, self.target)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        return mass_topology(self.config(), self.problem.itemsize)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return Config(
            head_dim=self.head_dim,
            depth=self.problem.depths[0],
            tile_m=self.tile[0],
            tile_n=self.tile[1],
            q_stages=self.stages,
            together=FEW_TOGETHER if _long(self.problem) else TOGETHER,
            masked=self.problem.mask_form != "none",
            one_body=self.problem.many_reads,
            lengths=self.problem.lengths,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes and barriers, and regions fit."""
        self.memory.check()
        self.topology.check_fits(self.memory, self.target, self.topology.unused)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words."""
        config = self.config()
        lines = [
            f"mass kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {self.tile[0]} queries x {self.tile[1]} keys, {self.head_dim} wide; Q {self.stages} deep",
            f"warpgroups: 1 producer, {config.consumers} consumers of {KEYS} keys each, of"
            f" {config.producer_registers} and {config.consumer_registers} registers",
            "shared memory:",
            self.memory.explain(),
            "pipeline (steps are tiles of queries):",
            self.topology.explain(),
        ]
        return "\n".join(lines)


def _long(problem: Problem) -> bool:
    """True if scores or masks take registers."""
    return bool(problem.long_scores or problem.long_masks or problem.pair_reads or problem.sloped)


def plan_mass(request: Request) -> MassPlan:
    """The plan with the deepest ring that fits."""
    problem, target = request.problem, request.target
    tile = SHORT_TILE if _long(problem) or problem.mask_form == "tables" else TILE
    plans = [MassPlan(target, problem, tile, pad(problem.head_dim), stages) for stages in STAGES]
    return next((plan for plan in plans if plan.memory.total <= target.shared_memory), plans[-1])


MASS_SM90 = Pipeline(
    "Hopper sums per key", "mass", lambda problem, target, sizes: target.family == "sm90", plan_mass
)
