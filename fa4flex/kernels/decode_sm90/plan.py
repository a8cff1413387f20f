"""The plan of the Hopper kernel for few query rows: tiles, stages, registers, splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.codegen.plan.bound import Bound, Size, expected_bound, for_long
from fa4flex.codegen.plan.counts import check_counts
from fa4flex.codegen.plan.errors import PlanError
from fa4flex.codegen.plan.memory import Memory, column_block, lay_out, tile_bytes
from fa4flex.codegen.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.request import ForwardRequest, Order, check_threshold, rescaling
from fa4flex.codegen.plan.splitting import Splitting
from fa4flex.codegen.plan.target import Target
from fa4flex.codegen.plan.topology import Topology
from fa4flex.codegen.plan.verify import prove
from fa4flex.codegen.plan.work import Work
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.decode_sm90.config import Config
from fa4flex.kernels.decode_sm90.topology import decode_topology
from fa4flex.kernels.fwd_sm90.plan import plan_hopper
from fa4flex.kernels.fwd_sm90.registers import Need, Split, consumer_need
from fa4flex.kernels.fwd_sm90.tiles import pad

ROWS = 64
"""Rows of a tile."""

NARROW = 64
"""Heads up to this width have tiles of KEYS[True] keys, wider ones of KEYS[False]: a tile is then 16 KB."""

KEYS = {True: 128, False: 64}

LINE = 128
"""Bytes of shared memory: a TMA copy writes from a multiple of it on."""

RESERVED = 1024
"""Bytes of shared memory that each block takes besides its own."""

LEAST_STAGES, MOST_STAGES = 2, 4

SPLITS = {2: Split(40, 216), 1: Split(56, 240)}
"""Registers by blocks of a multiprocessor."""


@dataclass(frozen=True)
class DecodePlan:
    """A forward kernel for `problem` on `target`, for so many keys per tile and stages, and so many blocks of
    a multiprocessor at a time.

    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    share                tiles of keys per split, where the schedule asks for it
    """

    target: Target
    problem: Problem
    tile_n: int
    kv_stages: int
    blocks: int
    registers: Split
    rescale_threshold: float
    work: Work
    share: int | None = None

    module: ClassVar[str] = "fa4flex.kernels.decode_sm90"

    @property
    def tile(self) -> tuple[int, int]:
        return ROWS, self.tile_n

    @property
    def order(self) -> Order:
        return "linear"

    @property
    def splitting(self) -> Splitting:
        uneven = self.problem.lengths != "dense"
        return Splitting(
            self.tile_n, self.problem.head_dim_v, self.target.multiprocessors, uneven, self.share
        )

    @property
    def box_rows(self) -> int:
        """Keys that one TMA copy brings: all of a tile, or as many as surely lie together in a page."""
        return min(self.problem.page_rows, self.tile_n) or self.tile_n

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the tiles of K and V in shared memory."""
        return pad(self.problem.head_dim), pad(self.problem.head_dim_v)

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.tile_n, self.kv_stages, self.target)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        clears = self.problem.lengths != "dense"
        return decode_topology(*self.widths, self.tile_n, self.kv_stages, clears, self.box_rows)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers."""
        return consumer_need(self.tile_n, self.widths[1], self.work)

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        return expected_bound(self.problem, self.widths, self.work, self.target, size)

    def config(self) -> Config:
        """What the hand-written kernel is built from."""
        return Config(
            head_dim=self.widths[0],
            head_dim_v=self.widths[1],
            tile_n=self.tile_n,
            kv_stages=self.kv_stages,
            blocks=self.blocks,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            rescale_threshold=self.rescale_threshold,
            lengths=self.problem.lengths,
            box_rows=self.box_rows,
            paged=self.problem.page_rows > 0,
            share=self.share,
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
        )

    def check(self) -> None:
        """PlanError or UnsupportedError unless the plan holds: sums of bytes, registers, barriers; regions;
        and a run of the token simulation."""
        self.memory.check()
        room = room_of(self.blocks, self.target)
        if self.memory.total > room:
            raise PlanError(
                f"{self.blocks} blocks of {self.memory.total} bytes of shared memory",
                f"at most {room} bytes each",
                "use fewer stages",
            )
        pool = self.target.register_pool(2 * self.blocks) // self.blocks
        if self.registers.producer + self.registers.consumer > pool:
            raise PlanError(
                f"{self.registers.producer} + {self.registers.consumer} registers per thread",
                f"at most {pool}, what two warpgroups of each block are launched with",
                "take a split from SPLITS",
            )
        if self.need.accumulators > self.registers.consumer:
            raise PlanError(
                f"{self.need.explain()} registers per consumer thread",
                f"at most {self.registers.consumer} for scores, probabilities and output",
                "use fewer keys per tile",
            )
        check_threshold(self.rescale_threshold, self.problem)
        check_counts(self.topology)
        self.topology.check_fits(self.memory, self.target)
        prove(self.topology)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        r = self.registers
        by = (
            "by shapes" if self.share is None else f"{self.share * self.tile_n} to each, as the schedule asks"
        )
        lines = [
            f"forward kernel for few query rows, {self.target.name} ({self.target.chip}):"
            f" {self.problem.explain()}",
            f"tile: all queries of a group of heads, in {ROWS} rows, x {self.tile_n} keys, q and k"
            f" {self.widths[0]} wide, v {self.widths[1]}, K and V {self.kv_stages} deep",
            f"  {self.blocks} of them on a multiprocessor; keys are split between blocks, {by}",
            f"warpgroups: 1 producer, 1 consumer of {r.producer} and {r.consumer} registers",
            f"  a consumer needs about {self.need.explain()}",
            f"softmax: {rescaling(self.rescale_threshold)}",
            *self._of_pages(),
            "shared memory:",
            self.memory.explain(),
            "pipeline:",
            self.topology.explain(),
            f"work: {self.work.explain()}",
            f"bound: {for_long(self.bound) if size is None else self.bound(size).explain()}",
        ]
        return "\n".join(lines)

    def _of_pages(self) -> list[str]:
        if not self.problem.page_rows:
            return []
        boxes = self.tile_n // self.box_rows
        return [
            f"pages: a tile is brought in {boxes} x {self.box_rows} keys, which lie where the page table says"
        ]


def _memory(problem: Problem, tile_n: int, kv_stages: int, target: Target) -> Memory:
    d, dv, size = pad(problem.head_dim), pad(problem.head_dim_v), problem.itemsize
    sizes = {
        "q": tile_bytes(ROWS, d, size),
        "k": tile_bytes(tile_n, d, size) * kv_stages,
        "v": tile_bytes(tile_n, dv, size) * kv_stages,
    }
    return lay_out(sizes, {}, 4 * kv_stages, target)


def room_of(blocks: int, target: Target) -> int:
    """Shared memory of each of so many blocks."""
    return (target.shared_memory + RESERVED) // blocks - RESERVED


def plan_decode(request: ForwardRequest) -> ForwardPlan:
    """Two blocks of a multiprocessor where each has LEAST_STAGES stages, so that one's loads run while the
    other begins or ends; else one. Who asks for tiles or an order gets the kernel that has a choice."""
    problem, target, schedule = request.problem, request.target, request.schedule
    if schedule.tile is not None or schedule.order != "auto" or schedule.next_tile != "auto":
        if problem.page_rows:
            raise UnsupportedError(
                "keys in pages, with tiles or an order that a schedule asks for",
                "a schedule without tile, order and next_tile",
                "nothing: pages are gathered instead",
            )
        return plan_hopper(request)
    tile_n = KEYS[max(pad(problem.head_dim), pad(problem.head_dim_v)) <= NARROW]
    fitting = [
        (blocks, stages)
        for blocks in (2, 1)
        for stages in range(MOST_STAGES, LEAST_STAGES - 1, -1)
        if _memory(problem, tile_n, stages, target).total <= room_of(blocks, target)
    ]
    blocks, stages = fitting[0]
    return DecodePlan(
        target=target,
        problem=problem,
        tile_n=tile_n,
        kv_stages=stages,
        blocks=blocks,
        registers=SPLITS[blocks],
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=None if schedule.split is None else -(-schedule.split // tile_n),
    )


LEAST_PAGE_ROWS = 8
"""Keys that lie next to each other in a page. Copies of fewer begin within a pattern of shared memory: they
are right on the simulator, and have not run on a chip."""


def accepts(problem: Problem, target: Target) -> bool:
    """Few query rows, whose key tiles are all or follow from spans. Pages: whose rows, or as many of them as
    lie next to each other, are whole lines of shared memory, as addresses of TMA copies there have to be."""
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    if 0 < problem.page_rows < LEAST_PAGE_ROWS:
        return False
    lines = all(problem.page_rows * column_block(d) * problem.itemsize % LINE == 0 for d in widths)
    return (
        target.family == "sm90"
        and problem.few_rows
        and lines
        and problem.mask_form in ("none", "spans")
        and problem.lengths in ("dense", "used")
        and "max_scores" not in problem.statistics
    )


DECODE_SM90 = Pipeline("Hopper forward, few query rows", "forward", accepts, plan_decode)
