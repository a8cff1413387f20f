"""The plan of the Hopper kernel for few query rows: tiles, stages, registers, splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.decode_sm90.config import Config
from fa4flex.kernels.decode_sm90.topology import decode_topology, skipping_topology
from fa4flex.kernels.fwd_sm90.plan import plan_hopper
from fa4flex.kernels.fwd_sm90.registers import Need, Split, consumer_need
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.few_rows import (
    MOST_ROWS,
    FewRowsPlan,
    asks_for_order,
    blocks_and_stages,
    keys_of,
    room_of,
    share_of,
    slice_rows,
    takes,
)
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import EVERY, ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology

STAGES = range(2, 5)

MOST_AHEAD = 1
"""Loads per score, at most, whose elements a thread keeps for a whole tile."""

SPLITS = {2: Split(40, 216), 1: Split(56, 240)}
"""Registers by blocks of a multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan(FewRowsPlan):
    """The plan of `decode_sm90`: registers of its two warpgroups besides."""

    registers: Split

    module: ClassVar[str] = "fa4flex.kernels.decode_sm90"
    rows: ClassVar[int] = MOST_ROWS

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the tiles of K and V in shared memory."""
        return pad(self.problem.head_dim), pad(self.problem.head_dim_v)

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.tile_n, self.kv_stages, self.target)

    @property
    def skip(self) -> float:
        """Probability that each row may leave out. Values of keys in pages are never left out: what finds
        them runs ahead of what is known of scores."""
        return _skip(self.problem)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        clears = self.config().clears
        if self.skip:
            return skipping_topology(*self.widths, self.tile_n, self.kv_stages, clears, self.tile_copies)
        return decode_topology(*self.widths, self.tile_n, self.kv_stages, clears, self.tile_copies)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers."""
        return consumer_need(self.tile_n, self.widths[1], self.work)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
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
            box_rows=self.tile_copies.box_rows,
            gather_warps=self.tile_copies.gather_warps,
            paged=self.problem.keys.loaded,
            starts_ahead=0 < self.work.loads <= MOST_AHEAD,
            share=self.share,
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            skip=self.skip,
            slice_rows=self.slice_rows,
        )

    def check_threads(self) -> None:
        self.check_registers()
        self.need.check(self.registers.consumer)

    def check_registers(self) -> None:
        """PlanError unless the two warpgroups of all blocks have their registers."""
        pool = self.target.register_pool(2 * self.blocks) // self.blocks
        if self.registers.producer + self.registers.consumer > pool:
            raise PlanError(
                f"{self.registers.producer} + {self.registers.consumer} registers per thread",
                f"at most {pool}, what two warpgroups of each block are launched with",
                "take a split from SPLITS",
            )

    def explain_threads(self) -> list[str]:
        r = self.registers
        return [
            f"warpgroups: 1 producer, 1 consumer of {r.producer} and {r.consumer} registers",
            f"  a consumer needs about {self.need.explain()}",
            *["  values are brought when a tile's scores are known to count"] * bool(self.skip),
        ]


def _skip(problem: Problem) -> float:
    return 0.0 if problem.keys.loaded else problem.skip


def _memory(problem: Problem, tile_n: int, kv_stages: int, target: Target) -> Memory:
    d, dv, size = pad(problem.head_dim), pad(problem.head_dim_v), problem.itemsize
    sizes = {
        "q": tile_bytes(MOST_ROWS, d, size),
        "k": tile_bytes(tile_n, d, size) * kv_stages,
        "v": tile_bytes(tile_n, dv, size) * kv_stages,
    }
    if _skip(problem):
        return lay_out({"asked": NUMBER * kv_stages, **sizes}, {}, 5 * kv_stages, target)
    return lay_out(sizes, {}, 4 * kv_stages, target)


def plan_decode(request: ForwardRequest) -> ForwardPlan:
    """The kernel for many rows has a choice of tiles and orders: schedules that ask for these get it."""
    if asks_for_order(request.schedule):
        return plan_hopper(request)
    problem, target = request.problem, request.target
    tile_n = keys_of((pad(problem.head_dim), pad(problem.head_dim_v)))

    def fits(blocks: int, stages: int) -> bool:
        return _memory(problem, tile_n, stages, target).total <= room_of(blocks, target)

    blocks, stages = blocks_and_stages(STAGES, fits)
    return DecodePlan(
        target=target,
        problem=problem,
        tile_n=tile_n,
        kv_stages=stages,
        blocks=blocks,
        registers=SPLITS[blocks],
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, tile_n),
        slice_rows=slice_rows(request.sizes, MOST_ROWS),
    )


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    return target.family == "sm90" and takes(problem, sizes)


DECODE_SM90 = Pipeline(
    "Hopper forward, few query rows",
    "forward",
    accepts,
    plan_decode,
    writes_float32=True,
    applies_output=True,
    weights=EVERY,
)
