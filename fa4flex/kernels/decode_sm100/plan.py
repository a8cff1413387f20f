"""The plan of the Blackwell kernel for few query rows: tiles, copies of rows, stages, splits. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.decode_sm100.config import (
    LANES,
    MERGED_STAGES,
    MERGED_STRIDE,
    Config,
    TensorMemory,
    kept,
    wider,
)
from fa4flex.kernels.decode_sm100.roles import WARPS, barrier_table
from fa4flex.kernels.decode_sm100.topology import decode_topology
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100, plan_blackwell
from fa4flex.kernels.fwd_sm100.tiles import WIDEST, pad
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
from fa4flex.kernels.plan.memory import BARRIER, NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import EVERY, ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sharing import sharing
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology

COPIES = (4, 2)
"""Copies of the query rows, most first: so many fit into the lanes of tensor memory."""

MOST_SCORES = 32
"""Scores of a thread: of 64, with the terms of a score mod beside them, some kernels spill."""

STAGES = range(2, 17)


@dataclass(frozen=True, kw_only=True)
class BlackwellDecodePlan(FewRowsPlan):
    """The plan of `decode_sm100`: copies of the query rows besides."""

    copies: int

    module: ClassVar[str] = "fa4flex.kernels.decode_sm100"
    gather_warps: ClassVar[int] = 1
    most_boxes: ClassVar[int] = 16

    @property
    def tile(self) -> tuple[int, int]:
        return LANES // self.copies, self.tile_n

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the tiles of K and V in shared memory."""
        return pad(self.problem.head_dim), pad(self.problem.head_dim_v)

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return memory_of(self.problem, self.tile_n, self.kv_stages, self.target)

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a block."""
        return columns_of(self.problem, self.tile_n, self.target)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        clears = self.config().clears
        return decode_topology(
            self.widths, self.tile_n, self.kv_stages, self.columns, clears, self.tile_copies
        )

    @property
    def registers(self) -> int:
        """Registers per thread, all of which are alike."""
        step = self.target.register_step
        return min(self.target.registers // (32 * WARPS * self.blocks) // step * step, 255)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        first = {r.name: r.first for r in self.columns.ranges}
        return Config(
            head_dim=self.widths[0],
            head_dim_v=self.widths[1],
            memory=TensorMemory(first["Q"], first["O"], first["S"], allocated(self.columns)),
            tile_n=self.tile_n,
            copies=self.copies,
            kv_stages=self.kv_stages,
            blocks=self.blocks,
            rescale_threshold=self.rescale_threshold,
            lengths=self.problem.lengths,
            box_rows=self.tile_copies.box_rows,
            gather_warps=self.tile_copies.gather_warps,
            paged=self.problem.keys.loaded,
            share=self.share,
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            slice_rows=self.slice_rows,
        )

    def check_threads(self) -> None:
        self._check_columns()
        if self.copies not in COPIES:
            raise PlanError(f"{self.copies} copies of query rows", f"one of {COPIES}", "use one of these")

    def _check_columns(self) -> None:
        """PlanError unless all blocks of a multiprocessor have their columns of tensor memory."""
        self.columns.check()
        each = allocated(self.columns)
        if self.blocks * each > self.target.tensor_columns:
            raise PlanError(
                f"{self.blocks} blocks of {each} columns of tensor memory",
                f"at most {self.target.tensor_columns} in all",
                "use fewer blocks, or narrower tiles",
            )

    def explain_rows(self) -> list[str]:
        return [
            f"  rows are {self.copies} times in tensor memory, and each copy meets"
            f" {self.tile_n // self.copies} keys of a tile"
        ]

    def explain_threads(self) -> list[str]:
        return [f"warps: 4 softmax, 1 multiply, 1 load, of {self.registers} registers"]

    def explain_columns(self) -> list[str]:
        return [
            f"tensor memory, {allocated(self.columns)} columns of which are allocated:",
            self.columns.explain(),
            *sharing(self.topology, self.columns),
        ]


def memory_of(problem: Problem, tile_n: int, kv_stages: int, target: Target) -> Memory:
    d, dv = pad(problem.head_dim), pad(problem.head_dim_v)
    sizes = region_sizes(problem, tile_n, kv_stages)
    return lay_out(sizes, {"merged": wider(d, dv)}, barrier_table(kv_stages).count, target)


def region_sizes(problem: Problem, tile_n: int, kv_stages: int) -> dict[str, int]:
    """Bytes of the regions of shared memory, besides barriers."""
    d, dv, size = pad(problem.head_dim), pad(problem.head_dim_v), problem.itemsize
    return {
        "freed": BARRIER,
        "columns": NUMBER,
        "statistics": kept(problem.statistics) * LANES * NUMBER,
        "k": tile_bytes(tile_n, d, size) * kv_stages,
        "v": tile_bytes(tile_n, dv, size) * kv_stages,
        "merged": MERGED_STAGES * LANES * MERGED_STRIDE * NUMBER,
    }


def columns_of(problem: Problem, tile_n: int, target: Target) -> Columns:
    """Scores, then queries, two elements in a column, and the output. Probabilities, two in a column as well,
    lie over their scores: each thread has read all of its own before it writes any."""
    d, dv = pad(problem.head_dim), pad(problem.head_dim_v)
    return Columns(
        (
            Range("S", 0, tile_n),
            Range("P", 0, tile_n // 2),
            Range("Q", tile_n, d // 2),
            Range("O", tile_n + d // 2, dv),
        ),
        target.tensor_columns,
    )


def allocated(columns: Columns) -> int:
    """Columns that a block asks for: a power of two, 32 at least."""
    used = max(r.end for r in columns.ranges)
    return max(1 << (used - 1).bit_length(), 32)


def plan_decode(request: ForwardRequest) -> ForwardPlan:
    """The kernel for many rows has a choice of tiles and orders: schedules that ask for these get it."""
    problem, target = request.problem, request.target
    if asks_for_order(request.schedule):
        return _for_many_rows(request)
    rows = request.sizes.rows
    copies = next((n for n in COPIES if rows.at_most(LANES // n, right="no")), COPIES[-1])
    tile_n = min(keys_of((pad(problem.head_dim), pad(problem.head_dim_v))), copies * MOST_SCORES)
    columns = allocated(columns_of(problem, tile_n, target))

    def fits(blocks: int, stages: int) -> bool:
        room = room_of(blocks, target)
        return (
            blocks * columns <= target.tensor_columns
            and memory_of(problem, tile_n, stages, target).total <= room
        )

    blocks, stages = blocks_and_stages(STAGES, fits)
    return BlackwellDecodePlan(
        target=target,
        problem=problem,
        tile_n=tile_n,
        copies=copies,
        kv_stages=stages,
        blocks=blocks,
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, tile_n),
        slice_rows=slice_rows(request.sizes, MOST_ROWS),
    )


def _for_many_rows(request: ForwardRequest) -> ForwardPlan:
    if not FWD_SM100.accepts(request.problem, request.target, request.sizes):
        raise UnsupportedError(
            f"a schedule with a tile, an order or `next_tile`, for {request.problem.explain()}",
            "keys that the kernel for many queries reads where they lie: contiguous ones, or those of narrow"
            " heads in pages",
            "nothing: pages are gathered instead",
        )
    return plan_blackwell(request)


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    fits = max(problem.head_dim, problem.head_dim_v) <= WIDEST
    return target.family == "sm100" and fits and takes(problem, sizes)


DECODE_SM100 = Pipeline(
    "Blackwell forward, few query rows",
    "forward",
    accepts,
    plan_decode,
    writes_float32=True,
    applies_output=True,
    weights=EVERY,
)
