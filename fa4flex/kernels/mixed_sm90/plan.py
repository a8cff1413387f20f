"""The plan of the Hopper kernel for mixed batches. Data only."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.fwd_sm90 import plan as forward
from fa4flex.kernels.fwd_sm90.plan import HopperPlan, plan_hopper
from fa4flex.kernels.fwd_sm90.roles import barrier_table
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.mixed_sm90.config import GROUPS, HANDED, KEPT, MOST_STAGES, NOTED, ROWS, Config
from fa4flex.kernels.mixed_sm90.splitting import MixedSplitting
from fa4flex.kernels.mixed_sm90.topology import few_topology, handing
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.few_rows import MOST_ROWS, asks_for_order, share_of
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology
from fa4flex.primitives.heads import ALIKE

WIDEST = 128
"""Widest heads: tiles of wider ones have keys that do not halve into whole steps of products."""


@dataclass(frozen=True)
class MixedPlan(HopperPlan):
    """The forward plan, for tiles of many rows. Sequences with few take the same rings, both consumers all of
    their rows and half of each tile of keys.

    share    tiles of keys of a part of such a sequence, where the schedule asks for it
    """

    share: int | None = None

    module: ClassVar[str] = "fa4flex.kernels.mixed_sm90"

    @cached_property
    def memory(self) -> Memory:
        """The forward kernel's, and what one consumer hands to the other."""
        base = self.tiles.memory(self.problem, self.kv_stages, self.target, self.dynamic)
        sizes = {"next": (HANDED + NOTED) * NUMBER, "kept": KEPT * ROWS * NUMBER}
        own = "barriers", *sizes
        sizes |= {region.name: region.size for region in base.regions if region.name not in own}
        table = barrier_table(self.tiles, self.kv_stages, self.dynamic)
        return lay_out(sizes, {}, table.used, self.target)

    @cached_property
    def topology(self) -> Topology:
        """The pipeline of tiles of many rows. A block may have tiles of few between these, whose events are
        others: places, by which runs are compared with it, are left out."""
        return replace(self.many, places=())

    @property
    def many(self) -> Topology:
        """The forward kernel's pipeline, whose tiles are all handed over."""
        return handing(self._forward)

    @property
    def _forward(self) -> Topology:
        return HopperPlan(**{f.name: getattr(self, f.name) for f in fields(HopperPlan)}).topology

    @property
    def splitting(self) -> MixedSplitting:
        """Parts of the keys of sequences with few rows."""
        width, chip = self.problem.head_dim_v, self.target.multiprocessors
        return MixedSplitting(self.tile[1], width, chip, uneven=True, share=self.share, rows=MOST_ROWS)

    @cached_property
    def few(self) -> Topology:
        """The pipeline of tiles of few rows. Each kind is proved by itself: between tiles, whoever has read a
        ring's stages has freed them."""
        return handing(few_topology(self._forward))

    def check(self) -> None:
        from fa4flex.kernels.plan.verify import prove  # imported where a kernel is compiled

        super().check()
        prove(self.few)

    def check_resources(self) -> None:
        super().check_resources()
        self.few.check_fits(self.memory, self.target)

    def config(self) -> Config:
        base = super().config()
        given = {f.name: getattr(base, f.name) for f in fields(base)}
        return Config(**given, few_rows=MOST_ROWS, share=self.share)

    def _explain_parts(self) -> str:
        asked = f"{(self.share or 0) * self.tile[1]} to each, as the schedule asks"
        return asked if self.share is not None else "by the work of all sequences"

    def explain(self, size: Size | None = None) -> str:
        lines = super().explain(size).split("\n")
        few = (
            f"sequences of up to {MOST_ROWS} rows (queries x heads that share keys): a tile for"
            f" each KV head, {self.tile[1] // GROUPS} of its keys for each consumer, spread among"
            f" others; keys are shared by blocks, {self._explain_parts()}"
        )
        pipeline = ["pipeline of tiles of few rows:", self.few.explain()]
        at = lines.index(next(line for line in lines if line.startswith("work:")))
        return "\n".join([*lines[:2], few, *lines[2:at], *pipeline, *lines[at:]])


def plan_mixed(request: ForwardRequest) -> ForwardPlan:
    """The kernel for many rows, where the schedule asks for tiles or an order."""
    plan = plan_hopper(request)
    if asks_for_order(request.schedule) or plan.tiles.consumers != GROUPS or plan.kv_stages < GROUPS:
        return plan
    given = {f.name: getattr(plan, f.name) for f in fields(plan)}
    mixed = MixedPlan(**given, share=share_of(request, plan.tiles.tile_n))
    deeper = (replace(mixed, kv_stages=n) for n in range(MOST_STAGES, plan.kv_stages, -1))
    return next((p for p in deeper if p.memory.total <= request.target.shared_memory), mixed)


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True for packed queries over pages, where outputs fit over their queries in float32, and nothing is to
    be left out."""
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    return (
        forward.accepts(problem, target, sizes)
        and problem.keys.loaded
        and problem.lengths == "packed"
        and problem.statistics in ((), ("lse",))
        and problem.shares == ALIKE
        and not problem.skip
        and widths[1] <= widths[0] <= WIDEST
    )


MIXED_SM90 = Pipeline("Hopper forward, mixed batches", "forward", accepts, plan_mixed, mixes=True)
