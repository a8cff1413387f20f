"""The plan of the Hopper forward kernel for wide heads: tiles, registers, heads in rows, splits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.fwd_sm90.packing import GROUPS, MOST_PACKED, ONE_HEAD
from fa4flex.kernels.fwd_sm90.plan import HopperPlan, form_of, takes_next
from fa4flex.kernels.fwd_sm90.registers import Need, consumer_need, split_registers
from fa4flex.kernels.fwd_sm90.tiles import Tiles, producer_computes
from fa4flex.kernels.fwd_wide_sm90.config import HALVES, Config
from fa4flex.kernels.fwd_wide_sm90.cost import wide_units
from fa4flex.kernels.fwd_wide_sm90.tiles import choose, memory_of
from fa4flex.kernels.fwd_wide_sm90.topology import wide_topology
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.few_rows import few_rows, share_of
from fa4flex.kernels.plan.forward_time import ForwardTime
from fa4flex.kernels.plan.memory import Memory
from fa4flex.kernels.plan.pipeline import Pipeline
from fa4flex.kernels.plan.problem import WIDEST, WIDEST_SHARED, Problem
from fa4flex.kernels.plan.request import ForwardRequest, check_threshold
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.splitting import Splits, Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology


@dataclass(frozen=True)
class WideSplitting(Splitting):
    """Splitting of launches with a block for each of `tiles` tiles of rows of a sequence and KV head."""

    tiles: int = 1

    def splits(self, batch: int, pairs: int, kv_len: int, rows: int) -> Splits:
        return super().splits(batch, pairs * self.tiles, kv_len, rows)


@dataclass(frozen=True)
class WidePlan(HopperPlan):
    """Beside a forward plan's:

    split     several blocks share the keys of a tile
    share     tiles of keys per split, where the schedule asks for that
    unpacked  tiles of rows of a KV head, where `split`
    """

    split: bool = False
    share: int | None = None
    unpacked: int = 1

    module: ClassVar[str] = "fa4flex.kernels.fwd_wide_sm90"

    @property
    def splitting(self) -> Splitting | None:
        if not self.split:
            return None
        return WideSplitting(
            self.tiles.tile_n,
            self.problem.head_dim_v,
            self.target.multiprocessors,
            1,
            self.problem.lengths != "dense",
            self.share,
            tiles=self.unpacked,
        )

    @cached_property
    def memory(self) -> Memory:
        return memory_of(self.tiles, self.kv_stages, self.dynamic, self.target)

    @cached_property
    def topology(self) -> Topology:
        clears = self.problem.lengths != "dense"
        topology = wide_topology(self.tiles, self.kv_stages, self.dynamic, clears)
        return replace(topology, may_end=self.split)

    def time_with(self, tiles: Tiles) -> ForwardTime:
        """The same with other tiles. Rows of all heads of a group take about as many steps as those of one
        head after the other, of which the model knows how many a causal mask leaves."""
        units = wide_units(tiles, self.problem, self.work, self.target)
        return replace(super().time_with(tiles), units=units, packed_heads=1)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers: of half of a tile's keys and columns."""
        return consumer_need(self.tiles.tile_n // HALVES, self.tiles.head_dim_v // HALVES, self.work)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        more = {"alias_output": False, "splits": self.split, "share": self.share}
        return Config(**{**vars(super().config()), **more})

    def check_resources(self) -> None:
        self.memory.check()
        self.registers.check(HALVES, self.target)
        self.need.check(self.registers.consumer)
        check_threshold(self.rescale_threshold, self.problem)
        self.topology.check_fits(self.memory, self.target)

    def explain_warpgroups(self) -> list[str]:
        r, wider = self.registers, "values" if self.problem.head_dim_v > WIDEST else "heads"
        return [
            f"warpgroups: 1 producer, {HALVES} consumers of {r.producer} and {r.consumer} registers, which"
            f" have the same rows, as {wider} are wider than {WIDEST}:",
            "  each has the scores of half of a tile's keys, and half of the output's columns",
        ]

    def explain_softmax(self) -> list[str]:
        return ["softmax: runs under the products of the keys before; probabilities lie in shared memory;"]

    def _explain_candidates(self, size: Size | None) -> list[str]:
        """The model knows of no blocks that share keys."""
        return [] if self.split else super()._explain_candidates(size)

    def _explain_rows(self) -> list[str]:
        told = ["  keys of a tile are split between blocks, by shapes, and their outputs merged"] * self.split
        return [*super()._explain_rows(), *told]


def plan_wide(request: ForwardRequest) -> WidePlan:
    """Raises UnsupportedError for tiles that do not fit."""
    problem, work, sizes = request.problem, request.work, request.sizes
    choice = choose(problem, request.schedule.tile, request.target)
    packed = _packed_heads(request)
    split = _splits(request)
    return WidePlan(
        target=request.target,
        problem=problem,
        tiles=choice.tiles,
        kv_stages=choice.kv_stages,
        registers=split_registers(HALVES, producer_computes(problem, work) or split),
        pingpong=False,
        order=request.order,
        rescale_threshold=request.rescale_threshold,
        work=work,
        persistent=not split,
        dynamic=takes_next(request) and not split,
        packed_heads=packed,
        reasons=(choice.reason, request.why),
        form=form_of(request),
        split=split,
        share=share_of(request, choice.tiles.tile_n) if split else None,
        unpacked=sizes.group // packed,
    )


def _packed_heads(request: ForwardRequest) -> int:
    """Query heads whose rows share tiles, of which one copy brings 64 rows; 1: each head has tiles of its
    own. Keys of a tile are looked for by its queries, so that heads have one mask; and where scores or sinks
    differ between heads, a thread's two rows are of one."""
    facts, problem, sizes = request.facts, request.problem, request.sizes
    group, by_head = sizes.group, problem.sinks or "h" in request.facts.score.free
    alike = problem.mask_form != "tables" and "h" not in facts.mask.free
    fits = group in GROUPS and not (by_head and group > ONE_HEAD)
    return group if alike and fits and sizes.rows.at_most(MOST_PACKED) else 1


def _splits(request: ForwardRequest) -> bool:
    """True if blocks may share the keys of a tile: of few rows, whose keys are all or follow from spans."""
    problem = request.problem
    plain = problem.mask_form in ("none", "spans") and request.order != "by_work"
    return plain and problem.lengths != "packed" and few_rows(problem, request.sizes)


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True for wide heads of keys that lie one after another, and rows of which the log-sum-exp is wanted, or
    nothing."""
    plain = not problem.keys.loaded and problem.keys.codes is None and problem.mask_form != "pairs"
    return target.family == "sm90" and problem.width > WIDEST and plain and set(problem.statistics) <= {"lse"}


FWD_WIDE_SM90 = Pipeline(
    "Hopper forward, wide heads",
    "forward",
    accepts,
    plan_wide,
    writes_float32=True,
    widest=WIDEST_SHARED,
)
