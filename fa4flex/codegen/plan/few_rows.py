"""Base of the plans for few query rows: tiles of pairs of a query and a head, keys split between blocks,
pages read where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fa4flex.codegen.plan.bound import Bound, Size, expected_bound
from fa4flex.codegen.plan.errors import PlanError
from fa4flex.codegen.plan.memory import Memory
from fa4flex.codegen.plan.paging import box_rows, readable
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.request import ForwardRequest, Order
from fa4flex.codegen.plan.splitting import Splitting
from fa4flex.codegen.plan.target import Target
from fa4flex.codegen.plan.work import Work

NARROW = 64
"""Heads up to this width have tiles of KEYS[True] keys, wider ones of KEYS[False]: a tile is then 16 KB."""

KEYS = {True: 128, False: 64}

RESERVED = 1024
"""Bytes of shared memory that each block takes besides its own."""


@dataclass(frozen=True, kw_only=True)
class FewRowsPlan:
    """A forward kernel for `problem` on `target`, for so many keys per tile and stages, and so many blocks of
    a multiprocessor at a time.

    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    share                tiles of keys per split, where the schedule asks for it
    """

    target: Target
    problem: Problem
    tile_n: int
    kv_stages: int
    blocks: int
    rescale_threshold: float
    work: Work
    share: int | None = None

    rows: ClassVar[int]
    """Rows of a tile."""

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the tiles of K and V in shared memory."""
        raise NotImplementedError

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.tile_n

    @property
    def order(self) -> Order:
        return "linear"

    @property
    def splitting(self) -> Splitting:
        uneven = self.problem.lengths != "dense"
        return Splitting(
            self.tile_n, self.problem.head_dim_v, self.target.multiprocessors, uneven, self.share
        )

    @property
    def box_rows(self) -> int:
        """Keys that one TMA copy brings: all of a tile, or as many as surely lie together in a page."""
        return box_rows(self.problem, self.tile_n)

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        return expected_bound(self.problem, self.widths, self.work, self.target, size)

    def check_room(self, memory: Memory) -> None:
        """PlanError unless all blocks of a multiprocessor have this shared memory."""
        room = room_of(self.blocks, self.target)
        if memory.total > room:
            raise PlanError(
                f"{self.blocks} blocks of {memory.total} bytes of shared memory",
                f"at most {room} bytes each",
                "use fewer stages",
            )

    def explain_splits(self) -> str:
        by = (
            "by shapes" if self.share is None else f"{self.share * self.tile_n} to each, as the schedule asks"
        )
        return f"  {self.blocks} of them on a multiprocessor; keys are split between blocks, {by}"


def room_of(blocks: int, target: Target) -> int:
    """Shared memory of each of so many blocks of a multiprocessor."""
    return (target.shared_memory + RESERVED) // blocks - RESERVED


def keys_of(widths: tuple[int, int]) -> int:
    """Keys of a tile."""
    return KEYS[max(widths) <= NARROW]


def share_of(request: ForwardRequest, tile_n: int) -> int | None:
    """Tiles of keys per split that the schedule asks for."""
    split = request.schedule.split
    return None if split is None else -(-split // tile_n)


def asks_for_order(request: ForwardRequest) -> bool:
    """True if the schedule has what only kernels for many rows have a choice of: tiles, or an order."""
    schedule = request.schedule
    return schedule.tile is not None or schedule.order != "auto" or schedule.next_tile != "auto"


def takes(problem: Problem, pad: Callable[[int], int]) -> bool:
    """True for few query rows whose key tiles are all or follow from spans, and whose pages can be read in
    place."""
    return (
        problem.few_rows
        and readable(problem, (pad(problem.head_dim), pad(problem.head_dim_v)))
        and problem.mask_form in ("none", "spans")
        and problem.lengths in ("dense", "used")
        and "max_scores" not in problem.statistics
    )
