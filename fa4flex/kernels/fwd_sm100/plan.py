"""The plan of a Blackwell forward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm100.columns import first_columns, lay_out_columns
from fa4flex.kernels.fwd_sm100.config import ROWS, Config, Exponential, Registers
from fa4flex.kernels.fwd_sm100.exponential import check_exponential, choose_exponential, explain_exponential
from fa4flex.kernels.fwd_sm100.pair import pair_topology
from fa4flex.kernels.fwd_sm100.registers import choose_registers, in_place, piece
from fa4flex.kernels.fwd_sm100.tiles import Tiles, choose, narrow, pad
from fa4flex.kernels.fwd_sm100.topology import Handed, forward_topology
from fa4flex.kernels.plan.bound import Bound, Size, expected_bound, explain_bound
from fa4flex.kernels.plan.memory import Memory
from fa4flex.kernels.plan.paging import box_rows, explain_pages, readable
from fa4flex.kernels.plan.pipeline import EVERY, Checked, Pipeline
from fa4flex.kernels.plan.problem import MMA_K, Problem
from fa4flex.kernels.plan.registers import check_registers
from fa4flex.kernels.plan.request import (
    BLOCKS,
    CANCELLING,
    ORDERS,
    ForwardRequest,
    Order,
    check_threshold,
    rescaling,
)
from fa4flex.kernels.plan.sharing import sharing
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.skipping import explain_skip
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.work import Work


@dataclass(frozen=True)
class BlackwellPlan(Checked):
    """A forward kernel for `problem` on `target`.

    registers            of each kind of warpgroup
    exponential          which exponentials FMA units compute
    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    persistent           one block per multiprocessor takes tile after tile; otherwise one block per tile
    dynamic              persistent blocks take the next tile when they are done, as tiles differ in work
    cancel               one block per tile, and those that run take over the tiles of those that wait
    reasons              why these tiles, and why this order

    Memory maps, pipeline and estimates follow from these: `dataclasses.replace` makes a consistent other
    plan, with another exponential for instance, and `check` says whether it is a legal one.
    """

    target: Target
    problem: Problem
    tiles: Tiles
    registers: Registers
    exponential: Exponential
    order: Order
    rescale_threshold: float
    work: Work
    persistent: bool = True
    dynamic: bool = False
    cancel: bool = False
    reasons: tuple[str, ...] = ()

    module: ClassVar[str] = "fa4flex.kernels.fwd_sm100"
    splitting: ClassVar[Splitting | None] = None
    packed_heads: ClassVar[int] = 1

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiles.tile_m, self.tiles.tile_n

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return self.tiles.memory(self.target, self.cancel)

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a block."""
        return lay_out_columns(self.tiles, self.target)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        if self.tiles.ctas == 1:
            return self.of_one_cta
        return pair_topology(self.of_one_cta, self.tiles)

    @cached_property
    def of_one_cta(self) -> Topology:
        """Topology of one CTA."""
        ragged = self.problem.lengths != "dense" and not self.tiles.transposed
        handed: Handed = "answer" if self.cancel else "number" if self.dynamic else ""
        return forward_topology(self.tiles, self.columns, handed, ragged, self.box_rows)

    @property
    def box_rows(self) -> int:
        """Keys that one TMA copy brings, where they lie in pages; else 0."""
        return box_rows(self.problem, self.tiles.tile_n) if self.problem.keys.loaded else 0

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
            memory=first_columns(self.columns),
            ctas=self.tiles.ctas,
            q_tiles=self.tiles.q_tiles,
            tile_n=self.tiles.tile_n,
            kv_stages=self.tiles.kv_stages,
            out_stages=self.tiles.out_stages,
            early_keys=self.tiles.early_keys,
            registers=self.registers,
            exponential=self.exponential,
            rescale_threshold=self.rescale_threshold,
            in_place=in_place(self.work),
            piece=piece(self.work),
            persistent=self.persistent,
            dynamic=self.dynamic,
            cancel=self.cancel,
            workers=self.target.multiprocessors,
            longest_first=self.order == "longest_first",
            lengths=self.problem.lengths,
            paged=self.problem.keys.loaded,
            box_rows=self.box_rows,
            tables=self.problem.mask_form == "tables",
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            skip=self.problem.skip,
            score_stages=self.tiles.score_stages,
            staggered=self.tiles.staggered,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes, columns, registers and barriers fit."""
        self.memory.check()
        self.columns.check()
        self.check_threshold()
        check_exponential(self.exponential, self.tiles.tile_n)
        check_registers(self.registers, "softmax", self.target, "take a split from registers.SPLITS")
        self.of_one_cta.check_fits(self.memory, self.target, self.of_one_cta.unused)

    def check_threshold(self) -> None:
        check_threshold(self.rescale_threshold, self.problem)

    def explain_products(self) -> list[str]:
        """Products in words, where they are not of the dtype of q, k and v."""
        return []

    @property
    def _blocks(self) -> str:
        return CANCELLING if self.cancel else BLOCKS[self.persistent, self.dynamic]

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        t, r = self.tiles, self.registers
        k_stages, v_stages = t.kv_stages
        lines = [
            f"forward kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {t.q_tiles} x {ROWS} queries x {t.tile_n} keys, q and k {t.head_dim} wide,"
            f" v {t.head_dim_v}, K {k_stages} and V {v_stages} deep",
            *(f"  {reason}" for reason in self.reasons),
            *self.explain_products(),
            f"warpgroups: {t.q_tiles} softmax, 1 correction and 1 of single warps (load, multiply, store,"
            f" schedule), of {r.softmax}, {r.correction} and {r.other} registers"
            + (f", and {r.idle} of an idle one" if r.idle else ""),
            f"softmax: {explain_exponential(self.exponential, t.tile_n)};",
            f"  {rescaling(self.rescale_threshold)}",
            *explain_skip(self.problem.skip, "a warp's 32 rows", "exponentials; values are multiplied by 0"),
            f"order: {ORDERS[self.order]}; {self._blocks}",
            *explain_pages(self.problem, self.tiles.tile_n),
            "shared memory:",
            self.memory.explain(),
            "tensor memory:",
            self.columns.explain(),
            *sharing(self.of_one_cta, self.columns),
            "pipeline:",
            self.of_one_cta.explain(),
            f"work: {self.work.explain()}",
            explain_bound(self.bound, size),
        ]
        return "\n".join(lines)


def plan_blackwell(request: ForwardRequest, kind: type[BlackwellPlan] = BlackwellPlan) -> BlackwellPlan:
    """The plan of this kind."""
    # Masks by tables are asked pair by pair: ends of rows are not read.
    request = replace(request, problem=replace(request.problem, row_ends=0))
    problem = request.problem
    if problem.keys.loaded and request.order == "by_work":
        raise UnsupportedError(
            "keys in pages, with tiles of queries sorted by their keys",
            'a schedule without order="longest_first"',
            "nothing: pages are gathered instead",
        )
    following = request.schedule.next_tile
    tiles, reasons = choose(
        problem, request.target, request.sizes, request.schedule.tile, following == "counter"
    )
    return kind(
        target=request.target,
        problem=problem,
        tiles=tiles,
        registers=choose_registers(tiles, request),
        exponential=choose_exponential(problem, request.target, tiles.ctas),
        order=request.order,
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        # The CTAs of a pair would each take a number of its own.
        dynamic=problem.uneven and tiles.ctas == 1 if following == "auto" else following == "counter",
        cancel=following == "launch_control",
        reasons=(*reasons, request.why),
    )


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True for all problems without pages, and for those with pages that can be read in place."""
    few = problem.mask_form == "pairs"  # asked in all tiles, by kernels for few rows
    return target.family == "sm100" and not few and (not problem.keys.loaded or _in_place(problem))


def _in_place(problem: Problem) -> bool:
    return narrow(problem) and readable(problem, (pad(problem.head_dim), pad(problem.head_dim_v)))


FWD_SM100 = Pipeline(
    "Blackwell forward",
    "forward",
    accepts,
    plan_blackwell,
    writes_float32=True,
    applies_output=True,
    drops=True,
    weights=EVERY,
)
