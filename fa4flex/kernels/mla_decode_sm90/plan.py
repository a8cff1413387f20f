"""The plan of the Hopper kernel for latent rows: tiles, registers, shared memory, splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm90.registers import Need, Split, consumer_need
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE, ROWS, Config
from fa4flex.kernels.mla_decode_sm90.topology import latent_topology
from fa4flex.kernels.plan.few_rows import FewRowsPlan, asks_for_order, share_of, takes
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.paging import TileCopies, box_rows
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import WIDEST_SHARED, Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology

REGISTERS = Split(40, 232)
"""Registers of the producer, which finds tiles itself, and of the two warpgroups that multiply."""

STATISTICS = 4
"""Numbers of a row in shared memory: maxima and sums of both warpgroups."""

STAGES = 1

MOST_BOXES = 8
"""Boxes of a piece, at most, whose copies one warp starts."""


@dataclass(frozen=True, kw_only=True)
class LatentPlan(FewRowsPlan):
    """The plan of `mla_decode_sm90`: registers of its warpgroups besides."""

    registers: Split

    module: ClassVar[str] = "fa4flex.kernels.mla_decode_sm90"
    rows: ClassVar[int] = ROWS
    purpose: ClassVar[str] = "few queries over latent rows"

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of a row and of its value."""
        return self.problem.head_dim, self.problem.head_dim_v

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return memory_of(self)

    @property
    def tile_copies(self) -> TileCopies:
        """Copies that bring a piece of a block."""
        return TileCopies(self.config().box_rows)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        config = self.config()
        return latent_topology(config.pieces, config.own, config.clears, config.box_rows)

    @property
    def need(self) -> Need:
        """Estimate of what a thread that multiplies keeps in registers."""
        return consumer_need(BLOCK, self.widths[1] // BLOCKS, self.work)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return Config(
            head_dim=self.widths[0],
            head_dim_v=self.widths[1],
            tile_n=self.tile_n,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            rescale_threshold=self.rescale_threshold,
            lengths=self.problem.lengths,
            paged=self.problem.keys.loaded,
            box_rows=box_rows(self.problem, BLOCK),
            share=self.share,
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
        )

    def check_threads(self) -> None:
        self.registers.check(BLOCKS, self.target)

    def explain_rows(self) -> list[str]:
        return [
            "  rows: queries of up to 64 heads; more of them are more tiles over the same keys",
            f"  keys: {BLOCKS} blocks of {BLOCK} in pieces of {PIECE} columns, each with barriers of its own;"
            " a row is key and value",
        ]

    def explain_threads(self) -> list[str]:
        r = self.registers
        return [
            f"warpgroups: 1 producer, 2 consumers of {r.producer} and {r.consumer} registers, which share an"
            " output: half of its columns each, and the scores of every other block",
            f"  a consumer needs about {self.need.explain()}",
        ]


def memory_of(plan: LatentPlan, known: dict[str, int] | None = None, barriers: int = 0) -> Memory:
    """The shared-memory map of a block. known, barriers: regions and mbarriers of a kernel besides."""
    width, itemsize = plan.widths[0], plan.problem.itemsize
    sizes = {
        **(known or {}),
        "q": tile_bytes(ROWS, width, itemsize),
        "k": tile_bytes(plan.tile_n, width, itemsize),
        "p": 0 if has_spare(plan.problem) else tile_bytes(BLOCKS * ROWS, BLOCK, itemsize),
        "statistics": STATISTICS * ROWS * NUMBER,
    }
    return lay_out(sizes, {}, 2 * BLOCKS * (width // PIECE) + barriers, plan.target)


def plan_latent(request: ForwardRequest) -> ForwardPlan:
    """Raises UnsupportedError for schedules that ask for tiles or an order."""
    return plan_rows(request, LatentPlan)


def plan_rows(request: ForwardRequest, kind: type[LatentPlan]) -> ForwardPlan:
    """A plan of this kind. Raises as plan_latent."""
    if asks_for_order(request.schedule):
        raise UnsupportedError(
            f"{request.schedule!r} with latent rows wider than {BLOCK}",
            "a Schedule without tile, order and next_tile",
            "leave them out",
        )
    tile_n = BLOCKS * BLOCK
    return kind(
        slice_rows=ROWS,
        target=request.target,
        problem=request.problem,
        tile_n=tile_n,
        kv_stages=STAGES,
        blocks=1,
        registers=REGISTERS,
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, tile_n),
    )


def has_pieces(problem: Problem) -> bool:
    """True for rows of whole pieces, as many of which are values for each warpgroup."""
    return problem.head_dim % PIECE == 0 and problem.head_dim_v % (BLOCKS * PIECE) == 0


def has_spare(problem: Problem) -> bool:
    """True for rows of which a piece is no value."""
    return problem.head_dim > problem.head_dim_v


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    keys = not problem.keys.loaded or BLOCK // box_rows(problem, BLOCK) <= MOST_BOXES
    plain = problem.keys.latent and set(problem.statistics) <= {"lse"}
    return target.family == "sm90" and has_pieces(problem) and keys and plain and takes(problem, sizes)


MLA_DECODE_SM90 = Pipeline(
    "Hopper forward, few queries over latent rows",
    "forward",
    accepts,
    plan_latent,
    writes_float32=True,
    latent=True,
    widest=WIDEST_SHARED,
)
