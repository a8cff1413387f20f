"""The plan of the Blackwell kernel for latent rows: columns of tensor memory, stages, splits. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.decode_sm100.config import LANES
from fa4flex.kernels.decode_sm100.roles import WARPS
from fa4flex.kernels.mla_decode_sm100.config import (
    BLOCK,
    HALVES,
    PIECE,
    ROWS,
    Config,
    TensorMemory,
    product_columns,
)
from fa4flex.kernels.mla_decode_sm100.roles import barrier_table
from fa4flex.kernels.mla_decode_sm100.topology import MAXIMA, latent_topology
from fa4flex.kernels.plan.few_rows import FewRowsPlan, asks_for_order, blocks_and_stages, share_of, takes
from fa4flex.kernels.plan.memory import BARRIER, NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.paging import TileCopies, box_rows
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import WIDEST_SHARED, Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology

STATISTICS = 2 + MAXIMA
"""Numbers of a thread in shared memory: its shift and sum, and its maxima."""

STAGES = range(2, 9)

MOST_BOXES = 8
"""Boxes of a piece, at most, whose copies one warp starts."""


@dataclass(frozen=True, kw_only=True)
class BlackwellLatentPlan(FewRowsPlan):
    """The plan of `mla_decode_sm100`."""

    module: ClassVar[str] = "fa4flex.kernels.mla_decode_sm100"
    rows: ClassVar[int] = ROWS
    purpose: ClassVar[str] = "few queries over latent rows"

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of a row and of its value."""
        return self.problem.head_dim, self.problem.head_dim_v

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.kv_stages, self.target)

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a block."""
        return _columns(self.problem, self.target)

    @property
    def tile_copies(self) -> TileCopies:
        """Copies that bring a piece of a tile."""
        return TileCopies(box_rows(self.problem, BLOCK))

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        config = self.config()
        return latent_topology(
            config.head_dim, config.held, self.kv_stages, self.columns, config.clears, config.box_rows
        )

    @property
    def registers(self) -> int:
        """Registers per thread, all of which are alike."""
        step = self.target.register_step
        return min(self.target.registers // (32 * WARPS) // step * step, 255)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        first = {r.name: r.first for r in self.columns.ranges}
        return Config(
            head_dim=self.widths[0],
            head_dim_v=self.widths[1],
            memory=TensorMemory(first["O"], first["S"], first["Q"], _allocated(self.columns)),
            held=_held(self.problem, self.target),
            kv_stages=self.kv_stages,
            rescale_threshold=self.rescale_threshold,
            lengths=self.problem.lengths,
            paged=self.problem.keys.loaded,
            box_rows=self.tile_copies.box_rows,
            share=self.share,
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
        )

    def check_threads(self) -> None:
        self.columns.check()

    def explain_rows(self) -> list[str]:
        return [
            "  rows: queries of up to 64 heads; more of them are more tiles over the same keys",
            "  a row is key and value; its scores and its output lie in two lanes of tensor memory, half of"
            " the columns in each",
            f"  {self.config().held} columns of queries lie in tensor memory, the others in shared memory",
        ]

    def explain_threads(self) -> list[str]:
        return [f"warps: 4 softmax, 1 multiply, 1 load, of {self.registers} registers"]

    def explain_columns(self) -> list[str]:
        return [
            f"tensor memory, {_allocated(self.columns)} columns of which are allocated:",
            self.columns.explain(),
        ]


def _memory(problem: Problem, kv_stages: int, target: Target) -> Memory:
    sizes = {
        "freed": BARRIER,
        "columns": NUMBER,
        "statistics": STATISTICS * LANES * NUMBER,
        "q": tile_bytes(ROWS, problem.head_dim - _held(problem, target), problem.itemsize),
        "k": tile_bytes(BLOCK, problem.head_dim, problem.itemsize) * kv_stages,
        "p": tile_bytes(ROWS, BLOCK, problem.itemsize),
    }
    return lay_out(sizes, {}, barrier_table(kv_stages).count, target)


def _columns(problem: Problem, target: Target) -> Columns:
    """The output, then scores: half of the columns of either, as each lies in both halves of the lanes. What
    is left has columns of queries, which are the same in both halves."""
    output, scores = problem.head_dim_v // HALVES, BLOCK // HALVES
    ranges = (
        Range("O", 0, output),
        Range("S", output, scores),
        Range("Q", output + scores, _held(problem, target) // 2),
    )
    return Columns(ranges, target.tensor_columns)


def _held(problem: Problem, target: Target) -> int:
    """Columns of queries in tensor memory, two in a column of it: whole pieces, and not the last one."""
    left = target.tensor_columns - (problem.head_dim_v + BLOCK) // HALVES
    return min(2 * left // PIECE * PIECE, problem.head_dim - PIECE)


def _allocated(columns: Columns) -> int:
    """Columns that a block asks for: a power of two."""
    used = max(r.end for r in columns.ranges)
    return 1 << (used - 1).bit_length()


def plan_latent(request: ForwardRequest) -> ForwardPlan:
    """Raises UnsupportedError for schedules that ask for tiles or an order."""
    problem, target = request.problem, request.target
    if asks_for_order(request.schedule):
        raise UnsupportedError(
            f"{request.schedule!r} with latent rows",
            "a Schedule without tile, order and next_tile",
            "leave them out",
        )

    def fits(blocks: int, stages: int) -> bool:
        return blocks == 1 and _memory(problem, stages, target).total <= target.shared_memory

    _, stages = blocks_and_stages(STAGES, fits)
    return BlackwellLatentPlan(
        slice_rows=ROWS,
        target=target,
        problem=problem,
        tile_n=BLOCK,
        kv_stages=stages,
        blocks=1,
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, BLOCK),
    )


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    widths = problem.head_dim % PIECE == 0 and problem.head_dim_v % product_columns(problem.head_dim_v) == 0
    keys = not problem.keys.loaded or BLOCK // box_rows(problem, BLOCK) <= MOST_BOXES
    plain = problem.keys.latent and set(problem.statistics) <= {"lse"}
    return target.family == "sm100" and widths and keys and plain and takes(problem, sizes)


MLA_DECODE_SM100 = Pipeline(
    "Blackwell forward, few queries over latent rows",
    "forward",
    accepts,
    plan_latent,
    writes_float32=True,
    latent=True,
    widest=WIDEST_SHARED,
)
