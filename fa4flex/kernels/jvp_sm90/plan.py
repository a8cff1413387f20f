"""The plan of a Hopper kernel of attention and its tangents. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.plan import SHORT_WAVES
from fa4flex.kernels.fwd_sm90.registers import LOADS, MOST_SCRATCH, ROWS, Need, Split, split_registers
from fa4flex.kernels.fwd_sm90.roles import barrier_table
from fa4flex.kernels.fwd_sm90.tiles import Tiles, pad, producer_computes
from fa4flex.kernels.jvp_sm90.config import Config
from fa4flex.kernels.jvp_sm90.topology import tangent_topology
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import Checked, Pipeline
from fa4flex.kernels.plan.problem import MMA_K, Problem
from fa4flex.kernels.plan.request import BLOCKS, ORDERS, ForwardRequest, Order, rescaling
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.work import Work
from fa4flex.primitives.heads import ALIKE

WIDEST = 128
"""The widest heads: of wider ones, both accumulators leave no registers for scores and their tangents."""

QUERIES = 128
"""Queries of a tile: two consumer warpgroups, as one's softmax runs under the other's products."""

KEYS = {64: (96, 64), 96: (96, 64, 48), 128: (64, 48, 32)}
"""Keys of a tile, in order of preference, by the width of its heads: accumulators of scores, of the output
and of both tangents then have 192 registers at most."""

ADDRESSES = 15
"""Descriptors, barrier addresses and phases, tile counters, as compiled kernels have them."""

STAGES = 2
"""Tiles of keys, and as many of values, in flight."""

EXACT = "float16"
"""Dtype whose maxima are taken at every tile: probabilities of up to 2^8 times tangents might overflow."""


@dataclass(frozen=True)
class TangentPlan(Checked):
    """A kernel of attention and its tangents for `problem` on `target`.

    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    dynamic              blocks take the next tile when they are done, as tiles differ in work
    reasons              why these tiles, and why this order
    """

    target: Target
    problem: Problem
    tiles: Tiles
    registers: Split
    order: Order
    rescale_threshold: float
    work: Work
    dynamic: bool
    reasons: tuple[str, ...] = ()

    module: ClassVar[str] = "fa4flex.kernels.jvp_sm90"
    packed_heads: ClassVar[int] = 1
    splitting: ClassVar[None] = None

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiles.tile_m, self.tiles.tile_n

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        sizes = {"next": NUMBER * HANDED} if self.dynamic else {}
        sizes |= tile_sizes(self.tiles, self.problem)
        return lay_out(sizes, {}, barrier_table(self.tiles, STAGES, self.dynamic).used, self.target)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        clears = self.problem.lengths != "dense"
        return tangent_topology(self.tiles, STAGES, self.problem.moved, self.dynamic, clears)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers."""
        return need_of(self.tiles, self.problem, self.work)

    @property
    def products(self) -> int:
        """Products of a step; a forward pass has two."""
        return 2 + len(self.problem.moved) + ("q" in self.problem.moved or "k" in self.problem.moved)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return Config(
            head_dim=self.tiles.head_dim,
            head_dim_v=self.tiles.head_dim_v,
            depth=-(-self.problem.head_dim // MMA_K),
            tile_m=self.tiles.tile_m,
            tile_n=self.tiles.tile_n,
            kv_stages=STAGES,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            pingpong=True,
            rescale_threshold=self.rescale_threshold,
            alias_output=False,
            persistent=True,
            dynamic=self.dynamic,
            workers=self.target.multiprocessors,
            longest_first=self.order == "longest_first",
            lengths=self.problem.lengths,
            one_body=self.problem.many_reads,
            tables=self.problem.mask_form == "tables",
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            row_ends=self.problem.row_ends,
            short_tiles=int(SHORT_WAVES * self.target.multiprocessors),
            moved=self.problem.moved,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes, registers and barriers, and regions fit."""
        self.memory.check()
        self.registers.check(self.tiles.consumers, self.target)
        least = sum(count for name, count in self.need.parts if name in ACCUMULATORS)
        if least > self.registers.consumer:
            raise PlanError(
                f"{self.need.explain()} registers per consumer thread",
                f"at most {self.registers.consumer} for scores, output and their tangents",
                "use fewer keys per tile",
            )
        self.topology.check_fits(self.memory, self.target)

    def explain(self, size: object = None) -> str:
        """The plan in words."""
        t, r = self.tiles, self.registers
        lines = [
            f"tangents kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {t.tile_m} queries x {t.tile_n} keys, q and k {t.head_dim} wide, v {t.head_dim_v},"
            f" K and V {STAGES} deep, with tangents of {', '.join(self.problem.moved)}",
            *(f"  {reason}" for reason in self.reasons),
            f"products: {self.products} where a forward pass has 2",
            f"warpgroups: 1 producer, {t.consumers} consumers of {r.producer} and {r.consumer} registers",
            f"  a consumer needs about {self.need.explain()}",
            "softmax: runs under the products of the other consumer, which take turns at the tensor cores;",
            f"  {rescaling(self.rescale_threshold)}",
            f"order: {ORDERS[self.order]}; {BLOCKS[True, self.dynamic]}",
            "shared memory:",
            self.memory.explain(),
            "pipeline:",
            self.topology.explain(),
            f"work: {self.work.explain()}",
        ]
        return "\n".join(lines)


def tile_sizes(tiles: Tiles, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory by region, in order."""
    size, moved = problem.itemsize, problem.moved
    sizes = {
        "q": tile_bytes(tiles.tile_m, tiles.head_dim, size),
        "k": tile_bytes(tiles.tile_n, tiles.head_dim, size) * STAGES,
        "v": tile_bytes(tiles.tile_n, tiles.head_dim_v, size) * STAGES,
    }
    return sizes | {f"t{name}": bytes_ for name, bytes_ in sizes.items() if name in moved}


ACCUMULATORS = "scores", "their tangents", "output", "its tangent"


def need_of(tiles: Tiles, problem: Problem, work: Work) -> Need:
    """Registers of a consumer thread at their most. Operands of values take the place of scores."""
    moves = "q" in problem.moved or "k" in problem.moved
    # What is computed of each score, for it and for its tangent, is alive for some of them at a time.
    hooks = work.uniform + ROWS * (work.row + work.row_ends + work.column) + min(work.element, MOST_SCRATCH)
    counts = tiles.tile_n // 2, tiles.tile_n // 2 * moves, tiles.head_dim_v // 2, tiles.head_dim_v // 2
    return Need(
        (
            *zip(ACCUMULATORS, counts, strict=True),
            ("row state", 3 * ROWS),
            ("hooks", hooks),
            ("slopes", tiles.tile_n // 4 * (moves and work.element > 0)),
            ("loads", LOADS if work.loads >= 1 else 0),
            ("addresses", ADDRESSES),
        )
    )


def plan_tangents(request: ForwardRequest) -> TangentPlan:
    problem, work = request.problem, request.work
    registers = split_registers(QUERIES // 64, producer_computes(problem, work))
    tiles, reasons = _tiles(problem, work, registers, request.target)
    return TangentPlan(
        target=request.target,
        problem=problem,
        tiles=tiles,
        registers=registers,
        order=request.order,
        rescale_threshold=0.0 if problem.dtype == EXACT else request.rescale_threshold,
        work=work,
        dynamic=problem.uneven,
        reasons=(*reasons, request.why),
    )


def _tiles(problem: Problem, work: Work, registers: Split, target: Target) -> tuple[Tiles, tuple[str, ...]]:
    """The first tile whose estimate of registers fits, or else the smallest one, and why."""
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    reasons: list[str] = []
    for tile_n in KEYS[max(widths)]:
        tiles = Tiles(QUERIES, tile_n, *widths)
        need = need_of(tiles, problem, work)
        told = f"{QUERIES} x {tile_n}: {need.explain()} registers of {registers.consumer}"
        if need.total <= registers.consumer:
            return tiles, (*reasons, told)
        reasons.append(f"not {told}")
    return tiles, (*reasons, f"{QUERIES} x {tile_n} is the least over; it may spill")


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True for heads up to WIDEST whose keys lie one after another."""
    return (
        target.family == "sm90"
        and bool(problem.moved)
        and problem.mask_form != "pairs"
        and problem.keys.plain
        and max(problem.head_dim, problem.head_dim_v) <= WIDEST
        and problem.statistics == ("lse",)
        and problem.shares == ALIKE
        and not problem.skip
    )


JVP_SM90 = Pipeline("Hopper tangents", "tangents", accepts, plan_tangents, writes_float32=True)
