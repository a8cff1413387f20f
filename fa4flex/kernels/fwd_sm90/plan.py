"""The plan of a Hopper forward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.packing import packed_heads
from fa4flex.kernels.fwd_sm90.registers import Need, Split, consumer_need, split_registers
from fa4flex.kernels.fwd_sm90.tiles import Tiles, choose, producer_computes, staged
from fa4flex.kernels.fwd_sm90.topology import forward_topology
from fa4flex.kernels.plan.bound import Bound, Size, expected_bound, explain_bound
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.memory import Memory
from fa4flex.kernels.plan.paging import Boxes, Producing, boxes_of, explain_pages, producing
from fa4flex.kernels.plan.pipeline import Checked, Pipeline
from fa4flex.kernels.plan.problem import MMA_K, Problem
from fa4flex.kernels.plan.request import BLOCKS, ORDERS, ForwardRequest, Order, check_threshold, rescaling
from fa4flex.kernels.plan.sizes import UNKNOWN, Sizes
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Staging, Topology
from fa4flex.kernels.plan.work import Work

PINGPONG_WIDEST = 128
"""The widest heads of which consumers take turns at the tensor cores. Wider heads spend so long in products
that turns only add waiting (FlashAttention-3's rule)."""

SHORT_WAVES = 1.5
"""Tiles of heads of few keys that are computed next to each other, at least, for each multiprocessor."""


@dataclass(frozen=True)
class HopperPlan(Checked):
    """A forward kernel for `problem` on `target`: tiles and stages, registers, hand-over and order.

    pingpong             see topology.py
    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    persistent           one block per multiprocessor takes tile after tile; otherwise one block per tile
    dynamic              persistent blocks take the next tile when they are done, as tiles differ in work
    packed_heads         query heads that share a head of keys, of which tiles of queries have rows; 1: each
                         head has tiles of its own
    reasons              why these tiles, and why this order

    Memory map, pipeline and estimates follow from these: `dataclasses.replace` makes a consistent other plan,
    and `check` says whether it is a legal one.
    """

    target: Target
    problem: Problem
    tiles: Tiles
    kv_stages: int
    registers: Split
    pingpong: bool
    order: Order
    rescale_threshold: float
    work: Work
    persistent: bool = True
    dynamic: bool = False
    packed_heads: int = 1
    reasons: tuple[str, ...] = ()

    module: ClassVar[str] = "fa4flex.kernels.fwd_sm90"

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiles.tile_m, self.tiles.tile_n

    @property
    def splitting(self) -> Splitting | None:
        """None: each block has all keys of a tile."""
        return None

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return self.tiles.memory(self.problem, self.kv_stages, self.target, self.dynamic)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        staging: Staging = "none"
        if staged(self.problem):
            staging = "queries" if self._shares else "own"
        return forward_topology(
            self.tiles, self.kv_stages, self.pingpong, staging, self.dynamic, self.boxes, self.producing
        )

    @property
    def producing(self) -> Producing:
        """Producer warps, and what they bring."""
        return producing(self.problem, self.tiles.tile_n)

    @property
    def boxes(self) -> Boxes | None:
        """Keys and columns that one TMA copy brings; None where keys do not lie in pages."""
        return boxes_of(self.problem, self.tiles.tile_n) if self.problem.keys.loaded else None

    @property
    def _shares(self) -> bool:
        return self.tiles.shares(self.problem, self.kv_stages, self.target)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers."""
        return consumer_need(self.tiles.tile_n, self.tiles.head_dim_v, self.work)

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        widths = self.problem.depths[0] * MMA_K, self.tiles.head_dim_v
        return expected_bound(self.problem, widths, self.work, self.target, size)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return Config(
            head_dim=self.tiles.head_dim,
            head_dim_v=self.tiles.head_dim_v,
            depth=self.problem.depths[0],
            tile_m=self.tiles.tile_m,
            tile_n=self.tiles.tile_n,
            q_stages=self.tiles.q_stages,
            kv_stages=self.kv_stages,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            pingpong=self.pingpong,
            rescale_threshold=self.rescale_threshold,
            alias_output=self._shares,
            persistent=self.persistent,
            dynamic=self.dynamic,
            workers=self.target.multiprocessors,
            longest_first=self.order == "longest_first",
            lengths=self.problem.lengths,
            boxes=self.boxes,
            producing=self.producing,
            one_body=self.problem.many_reads,
            tables=self.problem.mask_form == "tables",
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            row_ends=self.problem.row_ends,
            divisors=self.tiles.narrow and not self.problem.keys.loaded,
            short_tiles=int(SHORT_WAVES * self.target.multiprocessors),
            group=self.packed_heads,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes, registers and barriers, and regions fit."""
        self.memory.check()
        self.registers.check(self.tiles.consumers, self.target)
        if self.need.accumulators > self.registers.consumer:
            raise PlanError(
                f"{self.need.explain()} registers per consumer thread",
                f"at most {self.registers.consumer} for scores, probabilities and output",
                "use fewer keys per tile",
            )
        check_threshold(self.rescale_threshold, self.problem)
        self.topology.check_fits(self.memory, self.target)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        t, r = self.tiles, self.registers
        lines = [
            f"forward kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {t.tile_m} queries x {t.tile_n} keys, q and k {t.head_dim} wide, v {t.head_dim_v},"
            f" K and V {self.kv_stages} deep" + f", queries {t.q_stages}" * (t.q_stages > 1),
            *self._explain_rows(),
            *(f"  {reason}" for reason in self.reasons),
            f"warpgroups: 1 producer, {t.consumers} consumers of {r.producer} and {r.consumer} registers",
            f"  a consumer needs about {self.need.explain()}",
            f"softmax: runs under the products of the next keys; {_PINGPONG[self.pingpong]};",
            f"  {rescaling(self.rescale_threshold)}",
            f"order: {ORDERS[self.order]}; {BLOCKS[self.persistent, self.dynamic]}",
            *self._explain_pages(),
            "shared memory:",
            self.memory.explain(),
            "pipeline:",
            self.topology.explain(),
            f"work: {self.work.explain()}",
            explain_bound(self.bound, size),
        ]
        return "\n".join(lines)

    def _explain_pages(self) -> list[str]:
        warps = self.config().gather_warps
        apart = ["a second producer warp brings the values"] * (self.producing == "apart")
        return [*explain_pages(self.problem, self.tiles.tile_n, self.boxes, warps), *apart]

    def _explain_rows(self) -> list[str]:
        group = self.packed_heads
        told = (
            f"  queries are rows of {group} heads that share a head of keys, all heads of one after another"
        )
        return [told] * (group > 1)


_PINGPONG = {True: "consumers take turns at the tensor cores", False: "consumers issue products freely"}


def plan_hopper(request: ForwardRequest) -> HopperPlan:
    problem, work = request.problem, request.work
    if problem.keys.loaded and request.order == "by_work":
        raise UnsupportedError(
            "keys in pages, with tiles of queries sorted by their keys",
            'a schedule without order="longest_first"',
            "nothing: pages are gathered instead",
        )
    packed = packed_heads(request)
    choice = choose(request, UNKNOWN if packed > 1 else request.sizes)  # rows of a group fill tiles
    tiles = choice.tiles
    return HopperPlan(
        target=request.target,
        problem=problem,
        tiles=tiles,
        kv_stages=choice.kv_stages,
        registers=split_registers(tiles.consumers, producer_computes(problem, work)),
        pingpong=tiles.consumers > 1 and tiles.head_dim <= PINGPONG_WIDEST,
        order=request.order,
        rescale_threshold=request.rescale_threshold,
        work=work,
        dynamic=_dynamic(request),
        packed_heads=packed,
        reasons=(*choice.reasons, request.why),
    )


def _dynamic(request: ForwardRequest) -> bool:
    following = request.schedule.next_tile
    if following == "launch_control":
        raise UnsupportedError(
            f'next_tile="launch_control" on {request.target.name}',
            "a Blackwell GPU: earlier ones cannot cancel blocks that wait",
            'use Schedule(next_tile="counter"), which balances as well, or leave it at "auto"',
        )
    return request.problem.uneven if following == "auto" else following == "counter"


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True unless the mask is asked in all tiles, as kernels for few rows do."""
    return target.family == "sm90" and problem.mask_form != "pairs"


FWD_SM90 = Pipeline(
    "Hopper forward", "forward", accepts, plan_hopper, writes_float32=True, applies_output=True
)
