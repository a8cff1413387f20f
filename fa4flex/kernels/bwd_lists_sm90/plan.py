"""The plan of the Hopper backward kernel for listed keys: stages, registers, what it accepts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_lists_sm90.config import KEYS, Config
from fa4flex.kernels.bwd_lists_sm90.roles import barrier_table
from fa4flex.kernels.bwd_lists_sm90.topology import lists_backward_topology
from fa4flex.kernels.decode_sm90.plan import SPLITS
from fa4flex.kernels.fwd_sm90.registers import Split
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.lists.config import MOST_ENTRIES, ROWS, TABLE, UNITED, WORDS
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.few_rows import room_of
from fa4flex.kernels.plan.keys import ListedKeys
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import Checked, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import WARPGROUP, Topology
from fa4flex.primitives.heads import ALIKE

WIDEST = 128
"""Widest heads: registers hold dQ of 64 rows beside dK or dV of 64 keys."""

STAGES = ((3, 3), (3, 2), (2, 2), (2, 1))
"""Tiles of K and of V in flight, best first; shared memory of two blocks decides."""

BLOCKS = 2
"""Blocks of a multiprocessor: one's products run while the other waits for keys, or for its own."""


@dataclass(frozen=True)
class ListsBackwardPlan(Checked):
    """A backward kernel for `problem` on `target`. stages: tiles of K and of V in flight; united: rows of the
    lists whose queries a tile has."""

    target: Target
    problem: Problem
    stages: tuple[int, int]
    registers: Split
    united: int = 1

    module: ClassVar[str] = "fa4flex.kernels.bwd_lists_sm90"
    tile: ClassVar[tuple[int, int]] = (ROWS, KEYS)
    blocks: ClassVar[int] = BLOCKS
    ctas: ClassVar[int] = 1
    persistent: ClassVar[bool] = False
    stores_dq: ClassVar[bool] = True
    clears: ClassVar[bool] = False
    copies: ClassVar[bool] = False
    time: ClassVar[None] = None

    @property
    def head_dim(self) -> int:
        """Width of the tiles of Q and K in shared memory."""
        return pad(self.problem.head_dim)

    @property
    def head_dim_v(self) -> int:
        """Width of those of V and dO."""
        return pad(self.problem.head_dim_v)

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.target, self.stages, self.united)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        return lists_backward_topology(self.head_dim, self.head_dim_v, self.stages, self.united)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        k_stages, v_stages = self.stages
        return Config(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            tile_n=KEYS,
            kv_stages=k_stages,
            blocks=self.blocks,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            lengths=self.problem.lengths,
            beside=self.problem.keys.beside,
            statistics=(),
            united=self.united,
            v_stages=v_stages,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless bytes, registers and barriers fit."""
        self.memory.check()
        self.registers.check(1, self.target, self.blocks)
        self.topology.check_fits(self.memory, self.target)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words. What it costs follows from what is listed, which no size tells."""
        (k_stages, v_stages), r = self.stages, self.registers
        shared = "queries that share a list" if self.united == 1 else f"queries of {self.united} lists"
        lines = [
            f"backward kernel for listed keys, {self.target.name} ({self.target.chip}):"
            f" {self.problem.explain()}",
            f"tile: {ROWS} rows, {shared}, of heads that share keys, x {KEYS} keys, q and k {self.head_dim}"
            f" wide, v {self.head_dim_v}; K {k_stages} and V {v_stages} deep",
            f"keys: those of up to {MOST_ENTRIES} entries of a list, each unit once; {WARPGROUP} warps gather"
            + ("; a unit comes once for all lists of a tile" if self.united > 1 else ""),
            "dQ is written by the block that has all of its keys; dK and dV are added up in float32, in any"
            " order",
            f"warpgroups: 1 producer, 1 consumer of {r.producer} and {r.consumer} registers; {self.blocks}"
            " blocks share a multiprocessor",
            "shared memory:",
            self.memory.explain(),
            "pipeline:",
            self.topology.explain(),
        ]
        return "\n".join(lines)


def _memory(problem: Problem, target: Target, stages: tuple[int, int], united: int) -> Memory:
    """The shared-memory map for so many stages of K and of V."""
    d, dv, size = pad(problem.head_dim), pad(problem.head_dim_v), problem.itemsize
    k_stages, v_stages = stages
    scores = tile_bytes(ROWS, KEYS, size)
    over = {
        "k": tile_bytes(KEYS, d, size) * k_stages,
        "v": tile_bytes(KEYS, dv, size) * v_stages,
        "p": scores,
        "ds": scores,
    }
    regions = {
        "ids": NUMBER * KEYS * k_stages * (1 + (united > 1)),
        "bits": NUMBER * WORDS,
        "united": NUMBER * UNITED * (united > 1),
        "q": tile_bytes(ROWS, d, size),
        "dout": tile_bytes(ROWS, dv, size),
        **over,
        "behind": max(NUMBER * TABLE - sum(over.values()), 0),
    }
    return lay_out(regions, {}, barrier_table(*stages).count, target)


def plan_lists_backward(request: Request) -> ListsBackwardPlan:
    """Raises UnsupportedError where two blocks do not fit a multiprocessor."""
    problem, target = request.problem, request.target
    assert isinstance(problem.keys, ListedKeys)
    united, room = problem.keys.united, room_of(BLOCKS, target)
    fitting = (x for x in STAGES if _memory(problem, target, x, united).total <= room)
    stages = next(fitting, None)
    if stages is None:
        raise UnsupportedError(
            f"gradients over listed keys with heads of {problem.head_dim} and {problem.head_dim_v}",
            f"{BLOCKS} blocks of a multiprocessor that fit its shared memory",
            "use narrower heads",
        )
    return ListsBackwardPlan(target, problem, stages, SPLITS[BLOCKS], united)


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    if not problem.keys.listed or problem.keys.loaded:
        return False
    narrow = max(pad(problem.head_dim), pad(problem.head_dim_v)) <= WIDEST
    masks = problem.mask_form in ("none", "spans", "pairs")
    plain = not (problem.gradients or problem.deterministic or problem.entropy or problem.output)
    alike = problem.shares == ALIKE and not problem.wide_output
    return target.family == "sm90" and narrow and masks and plain and alike


BWD_LISTS_SM90 = Pipeline(
    "Hopper backward, listed keys", "backward", accepts, plan_lists_backward, listed=True
)
