"""The plan of the two Blackwell backward kernels of heads up to 256. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_sm100 import config as base
from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.one_cta import plan as one_cta
from fa4flex.kernels.bwd_sm100.plan import BlackwellBackwardPlan, padded
from fa4flex.kernels.bwd_sm100.topology import HALVES
from fa4flex.kernels.bwd_sm100.two_kernels.config import (
    HALF,
    PACKED,
    SCORE_STAGES,
    SPLIT,
    STEP,
    VALUES,
    Config,
    Registers,
    TensorMemory,
)
from fa4flex.kernels.bwd_sm100.two_kernels.roles import barrier_table, value_barriers
from fa4flex.kernels.bwd_sm100.two_kernels.topology import keys_topology, values_topology
from fa4flex.kernels.bwd_sm100.wide_heads import plan as wide_heads
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.memory import BARRIER, NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import EVERY, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.registers import check_registers
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.sharing import sharing
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology

WIDTHS = (256,)
"""Widths that a tile in shared memory may have, of either operand."""


@dataclass(frozen=True)
class TwoKernelsPlan(BlackwellBackwardPlan):
    """Two backward kernels for `problem` on `target`, one after the other: of dV, and of dK and dQ, which is
    the one that `memory`, `columns` and `topology` are of."""

    registers: Registers = SPLIT

    module: ClassVar[str] = "fa4flex.kernels.bwd_sm100.two_kernels"

    kind = Config

    @property
    def tile(self) -> tuple[int, int]:
        return STEP, ROWS

    def barriers(self, config: base.Config) -> int:
        return barrier_table(config).count

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a block for dK and dQ: dK, values, dP and scores. dS lie over dP, two in a
        column, at the start of each half of the queries; and so does dQ', whose columns are queries, of the
        first 128 columns of the head. That of the others lies over the scores."""
        values, dprob = self.head_dim, self.head_dim + self.head_dim_v // 2
        scores = dprob + STEP
        halves = [
            Range(f"{name} {i}", first + i * HALF, count)
            for name, first, count in (("S", scores, HALF), ("dP", dprob, HALF), ("dS", dprob, PACKED))
            for i in HALVES
        ]
        dq = Range("dQ", dprob, STEP), Range("dQ late", scores, STEP)
        sums = Range("dK", 0, self.head_dim), *_held("V", values, self.head_dim_v), *dq
        return Columns((*halves, *sums), self.target.tensor_columns)

    @cached_property
    def value_columns(self) -> Columns:
        """The tensor-memory map of a block for dV: dV, keys, and scores in two stages, over which
        probabilities lie, likewise."""
        keys, scores = self.head_dim_v, self.head_dim_v + self.head_dim // 2
        halves = [
            Range(f"{name} {i}", scores + i * HALF, count, SCORE_STAGES, STEP)
            for name, count in (("S", HALF), ("P", PACKED))
            for i in HALVES
        ]
        sums = Range("dV", 0, self.head_dim_v), *_held("K", keys, self.head_dim)
        return Columns((*halves, *sums), self.target.tensor_columns)

    @cached_property
    def value_memory(self) -> Memory:
        """The shared-memory map of a block for dV."""
        config, size = self.config().values, self.problem.itemsize
        sizes = {
            "freed": BARRIER,
            "columns": NUMBER,
            "lse2": NUMBER * STEP * config.q_stages,
            "q": tile_bytes(STEP, self.head_dim, size) * config.q_stages,
            "dout": tile_bytes(STEP, self.head_dim_v, size) * config.do_stages,
        }
        return lay_out(sizes, {}, value_barriers(config).count, self.target)

    @cached_property
    def topology(self) -> Topology:
        return keys_topology(self.config(), self.columns, self.problem.itemsize)

    @cached_property
    def value_topology(self) -> Topology:
        """Roles, rings and barriers of the kernel for dV."""
        return values_topology(self.config().values, self.value_columns, self.problem.itemsize)

    @property
    def topologies(self) -> dict[str, Topology]:
        """Both, by a part of their kernels' names."""
        return {"OfValues": self.value_topology, "OfKeys": self.topology}

    def operands(self, config: base.Config) -> dict[str, int]:
        found = super().operands(config)
        del found["v"]
        return found

    def config(self) -> Config:
        config = super().config()
        assert isinstance(config, Config)
        return replace(config, held=self.head_dim)

    def tensor_memory(self) -> TensorMemory:
        first = {r.name: r.first for r in self.columns.ranges}
        scores, ds = ((first[f"{name} 0"], first[f"{name} 1"]) for name in ("S", "dS"))
        return TensorMemory(scores[0], scores, 0, first["dP 0"], ds, first["dK"], first["dQ"])

    def check_resources(self) -> None:
        super().check_resources()
        self.value_memory.check()
        self.value_columns.check()
        check_registers(VALUES, "compute", self.target, "take two_kernels.config.VALUES")
        self.value_topology.check_fits(self.value_memory, self.target)

    def check(self) -> None:
        from fa4flex.kernels.plan.verify import prove  # imported where a kernel is compiled

        super().check()
        prove(self.value_topology)

    def explain(self, size: Size | None = None) -> str:
        lines = [
            super().explain(size),
            "before it, a kernel of its own for dV, which computes the scores again:",
            "warpgroups: 1 that is idle, 2 compute and 1 of single warps (multiply, load), of"
            f" {VALUES.reduce}, {VALUES.compute} and {VALUES.other} registers",
            "shared memory:",
            self.value_memory.explain(),
            "tensor memory:",
            self.value_columns.explain(),
            *sharing(self.value_topology, self.value_columns),
            "pipeline (steps are tiles of queries):",
            self.value_topology.explain(),
        ]
        return "\n".join(lines)


def _held(name: str, first: int, width: int) -> tuple[Range, ...]:
    """Keys or values, two elements in a column; a compute warpgroup brings either half."""
    count = width // 4
    return tuple(Range(f"{name} {i}", first + i * count, count) for i in HALVES)


def plan_two_kernels(request: Request) -> TwoKernelsPlan:
    """Raises UnsupportedError for what no kernel has: callers then compute it another way."""
    problem = request.problem
    head_dim, head_dim_v = padded(problem, WIDTHS)
    if head_dim is None or head_dim_v is None:
        raise UnsupportedError(
            f"a backward kernel for {problem.explain()}",
            f"heads of at most {WIDTHS[-1]}: dK, values, scores and dP of {STEP} queries are all of tensor"
            " memory",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    return TwoKernelsPlan(request.target, problem, head_dim, head_dim_v)


def _wider(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True for heads that one kernel has no room for."""
    fits = problem.head_dim <= wide_heads.WIDTHS[-1] and problem.head_dim_v <= one_cta.WIDTHS[-1]
    return target.family == "sm100" and not fits


TWO_KERNELS = Pipeline(
    "Blackwell backward by two kernels",
    "backward",
    _wider,
    plan_two_kernels,
    drops=True,
    weights=EVERY,
)
