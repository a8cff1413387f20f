"""The plan of the Blackwell kernel for listed keys: copies of rows, stages, registers, splits. Data only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.decode_sm100.config import LANES, wider
from fa4flex.kernels.decode_sm100.plan import (
    STAGES,
    BlackwellDecodePlan,
    allocated,
    columns_of,
    region_sizes,
)
from fa4flex.kernels.fwd_sm90.registers import Split
from fa4flex.kernels.fwd_sm100.tiles import WIDEST, pad
from fa4flex.kernels.lists.config import ROWS
from fa4flex.kernels.lists.plan import ListedPlan, behind, check_schedule, entry_sizes, takes_lists
from fa4flex.kernels.lists_sm100.config import Config
from fa4flex.kernels.lists_sm100.roles import WARPS, barrier_table
from fa4flex.kernels.lists_sm100.topology import lists_topology
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.few_rows import blocks_and_stages, room_of, share_of
from fa4flex.kernels.plan.keys import ListedKeys
from fa4flex.kernels.plan.memory import Memory, lay_out
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import WARP, WARPGROUP, Topology

KEYS = 64
"""Keys of a tile: a thread has 32 scores of it, or, of as many rows as tensor memory has lanes, all."""

SPLITS = {2: Split(48, 144), 1: Split(104, 232)}
"""Registers of a thread that gathers and of one that takes the softmax, by blocks of a multiprocessor."""

QUARTERS = 4
"""Parts of a multiprocessor, each of which has a part of its registers and as many warps as another one."""


@dataclass(frozen=True, kw_only=True)
class BlackwellListsPlan(ListedPlan, BlackwellDecodePlan):
    """The plan of `lists_sm100`.

    united    rows of the lists whose queries a tile has
    """

    united: int = 1

    module: ClassVar[str] = "fa4flex.kernels.lists_sm100"

    @property
    def rows(self) -> int:  # type: ignore[override]  # other kernels' is the same for all plans
        """Rows of a tile."""
        return LANES // self.copies

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.target, self.kv_stages, self.united)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        return lists_topology(self.widths, self.tile_n, self.kv_stages, self.columns, self.united)

    @property
    def registers(self) -> int:
        """Registers per thread that a block is launched with."""
        step, warps = self.target.register_step, -(-WARPS * self.blocks // QUARTERS) * QUARTERS
        return min(self.target.registers // (WARP * warps) // step * step, 255)

    @property
    def split(self) -> Split:
        """Registers per thread after the split. The warp that multiplies keeps those of the launch."""
        return SPLITS[self.blocks]

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        plain, split = super(ListedPlan, self).config(), self.split
        given = {one.name: getattr(plain, one.name) for one in fields(plain)}
        return Config(
            **given,
            gather_registers=split.producer,
            softmax_registers=split.consumer,
            beside=self.problem.keys.beside,
            united=self.united,
        )

    def check_threads(self) -> None:
        self._check_columns()
        if self.copies not in (1, 2):
            raise PlanError(f"{self.copies} copies of query rows", "1 or 2", "use one of these")
        if self.split.producer + self.split.consumer > 2 * self.registers:
            raise PlanError(
                f"{self.split.producer} + {self.split.consumer} registers per thread",
                f"at most {2 * self.registers}, what two warpgroups are launched with",
                "take a split from SPLITS",
            )

    def explain_threads(self) -> list[str]:
        return [
            f"warps: {WARPGROUP} softmax of {self.split.consumer} registers, {WARPGROUP} that gather of"
            f" {self.split.producer}, 1 multiply of {self.registers}"
        ]


def _memory(problem: Problem, target: Target, kv_stages: int, united: int) -> Memory:
    plain = region_sizes(problem, KEYS, kv_stages)
    tiles = {name: plain.pop(name) for name in "kv"}
    merged = {"merged": plain.pop("merged")}
    known = {**entry_sizes(KEYS, kv_stages, united), **tiles, "behind": behind(sum(tiles.values()))}
    over = {"merged": wider(pad(problem.head_dim), pad(problem.head_dim_v))}
    return lay_out({**plain, **known, **merged}, over, barrier_table(kv_stages).count, target)


def plan_lists(request: ForwardRequest) -> ForwardPlan:
    """Raises UnsupportedError for schedules that ask for tiles or an order."""
    check_schedule(request)
    problem, target = request.problem, request.target
    assert isinstance(problem.keys, ListedKeys)
    copies, united = 1 if problem.keys.many else LANES // ROWS, problem.keys.united
    columns = allocated(columns_of(problem, KEYS, target))

    def fits(blocks: int, stages: int) -> bool:
        # Of two blocks with all keys of a tile per thread, some kernels would spill.
        here = blocks <= copies and blocks * columns <= target.tensor_columns
        return here and _memory(problem, target, stages, united).total <= room_of(blocks, target)

    blocks, stages = blocks_and_stages(STAGES, fits)
    return BlackwellListsPlan(
        target=target,
        problem=problem,
        tile_n=KEYS,
        copies=copies,
        kv_stages=stages,
        blocks=blocks,
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, KEYS),
        united=united,
    )


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    fits = max(problem.head_dim, problem.head_dim_v) <= WIDEST
    return target.family == "sm100" and fits and takes_lists(problem)


LISTS_SM100 = Pipeline(
    "Blackwell forward, listed keys",
    "forward",
    accepts,
    plan_lists,
    writes_float32=True,
    weights=("softmax", "elementwise"),
    listed=True,
)
