"""Base of the plans of Blackwell backward kernels. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.bwd_sm100.config import (
    FRAGMENT,
    ROWS,
    Config,
    Registers,
    TensorMemory,
)
from fa4flex.kernels.bwd_sm100.roles import barrier_table
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.memory import BARRIER, NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import Checked
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.registers import check_registers
from fa4flex.kernels.plan.sharing import sharing
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import Topology


@dataclass(frozen=True)
class BlackwellBackwardPlan(Checked):
    """A backward kernel for `problem` on `target`. head_dim, head_dim_v: as padded in shared memory."""

    target: Target
    problem: Problem
    head_dim: int
    head_dim_v: int
    registers: Registers = Registers()

    ctas = 1
    persistent = False

    by = "one CTA"
    """In words."""

    module: ClassVar[str]

    kind: ClassVar[type[Config]] = Config
    """The class of what the kernel is built from."""

    copies = False
    stores_dq = False
    clears = False
    time = None
    """Nobody has timed one: there is nothing to fit a model to."""

    part = ""
    """Suffix of the names of a half's first columns."""

    @property
    def tile(self) -> tuple[int, int]:
        """Queries per step, and keys per block."""
        return ROWS, ROWS

    @property
    def columns(self) -> Columns:
        """The tensor-memory map of a CTA."""
        raise NotImplementedError

    @property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        raise NotImplementedError

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a CTA."""
        config = self.config()
        sizes = {
            "freed": BARRIER,
            "columns": NUMBER,
            "lse2": NUMBER * self.tile[0] * config.q_stages,
            "delta": NUMBER * self.tile[0] * config.do_stages,
            **self.operands(config),
            "dq": NUMBER * ROWS * FRAGMENT * config.dq_stages,
        }
        sizes = {name: size for name, size in sizes.items() if size}
        return lay_out(sizes, {}, self.barriers(config), self.target)

    def operands(self, config: Config) -> dict[str, int]:
        """Bytes of what products read in shared memory."""
        size = self.problem.itemsize
        queries, keys = self.tile[0], ROWS
        q, dout = (tile_bytes(queries, width, size) for width in (self.head_dim, self.head_dim_v))
        return {
            "q": q * config.q_stages,
            "k": tile_bytes(keys, self.head_dim, size),
            "v": tile_bytes(keys, self.head_dim_v, size),
            "dout": dout * config.do_stages,
            "ds": tile_bytes(queries, keys, size),
        }

    def barriers(self, config: Config) -> int:
        """Number of barriers of a CTA."""
        return barrier_table(config).count

    @property
    def of_one_cta(self) -> Topology:
        """Topology of one CTA."""
        return self.topology

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return self.kind(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            depths=self.problem.depths,
            memory=self.tensor_memory(),
            registers=self.registers,
            masked=self.problem.mask_form != "none",
            lengths=self.problem.lengths,
            deterministic=self.problem.deterministic,
        )

    def tensor_memory(self) -> TensorMemory:
        """First column of each range in `columns`."""
        first = {r.name: r.first for r in self.columns.ranges}

        def halves(name: str) -> tuple[int, int]:
            return first[f"{name} 0{self.part}"], first[f"{name} 1{self.part}"]

        return TensorMemory(
            scores=halves("S")[0],
            probabilities=halves("P"),
            dv=first["dV"],
            dprob=halves("dP")[0],
            ds=halves("dS"),
            dk=first["dK"],
            dq=first["dQ"],
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes, columns, registers and barriers fit."""
        self.memory.check()
        self.columns.check()
        check_registers(
            self.registers, "compute", self.target, "take the split of bwd_sm100.config.Registers"
        )
        self.of_one_cta.check_fits(self.memory, self.target)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words. How long a launch of a `size` takes at least is not known."""
        r, ordered = self.registers, self.problem.deterministic
        lines = [
            f"backward kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {self.tile[0]} queries x {self.tile[1]} keys, q and k {self.head_dim} wide, v"
            f" {self.head_dim_v}, by {self.by}",
            "warpgroups: 1 hands on dQ, 2 compute and 1 of single warps (multiply, load), of"
            f" {r.reduce}, {r.compute} and {r.other} registers",
            *["sums of dQ come in one order: each warp that hands it on awaits its turn"] * ordered,
            "shared memory:",
            self.memory.explain(),
            "tensor memory:",
            self.columns.explain(),
            *sharing(self.topology, self.columns),
            "pipeline (steps are tiles of queries):",
            self.of_one_cta.explain(),
        ]
        return "\n".join(lines)


def padded(problem: Problem, widths: tuple[int, ...]) -> tuple[int | None, int | None]:
    """The least of these widths that hold a head of q and k, and of v; None where none does."""
    head_dim, head_dim_v = (
        next((width for width in widths if width >= wanted), None)
        for wanted in (problem.head_dim, problem.head_dim_v)
    )
    return head_dim, head_dim_v
