"""Base of the plans for few query rows: tiles of pairs of a query and a head, keys split between blocks,
pages read where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fa4flex.kernels.plan.bound import Bound, Size, expected_bound, explain_bound
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.memory import Memory
from fa4flex.kernels.plan.paging import TileCopies, box_rows, explain_pages
from fa4flex.kernels.plan.pipeline import Checked
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest, Order, check_threshold, rescaling
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.skipping import explain_exact, explain_skip
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import WARPGROUP, Topology
from fa4flex.kernels.plan.work import Work
from fa4flex.primitives.schedule import Schedule

MOST_ROWS = 64
"""Rows of a tile, at most: queries times the heads that share a KV head."""

MOST_SLICED = 32
"""Queries, at most, of which several tiles have some heads each, where all heads are more rows than a tile
has. Kernels for many rows have tiles of 128 queries of a head."""

NARROW = 64
"""Heads up to this width have tiles of KEYS[True] keys, wider ones of KEYS[False]: a tile is then 16 KB."""

KEYS = {True: 128, False: 64}

RESERVED = 1024
"""Bytes of shared memory that each block takes besides its own."""


@dataclass(frozen=True, kw_only=True)
class FewRowsPlan(Checked):
    """A forward kernel for `problem` on `target`, for so many keys per tile and stages, and so many blocks of
    a multiprocessor at a time.

    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    share                tiles of keys per split, where the schedule asks for it
    slice_rows           rows of a tile, at most, that has some heads of a group; 0: tiles have all heads
    """

    target: Target
    problem: Problem
    tile_n: int
    kv_stages: int
    blocks: int
    rescale_threshold: float
    work: Work
    share: int | None = None
    slice_rows: int = 0

    rows: ClassVar[int]
    """Rows of a tile."""

    gather_warps: ClassVar[int] = WARPGROUP
    """Warps that copy rows, where pages are of few keys."""

    most_boxes: ClassVar[int] = 8
    """Boxes of a tile, at most; of more, rows are copied. A TMA copy takes 19 clocks to start, and a box is
    two of keys and two of values."""

    purpose: ClassVar[str] = "few query rows"
    """Use of the kernel, in words."""

    packed_heads: ClassVar[int] = 1
    """Tiles hold whole groups of heads, and queries of a batch entry are one tile."""

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the tiles of K and V in shared memory."""
        raise NotImplementedError

    @property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        raise NotImplementedError

    @property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        raise NotImplementedError

    @property
    def skip(self) -> float:
        """Probability that each row may leave out; 0: the kernel leaves out nothing."""
        return 0.0

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.tile_n

    @property
    def order(self) -> Order:
        return "linear"

    @property
    def splitting(self) -> Splitting:
        uneven = self.problem.lengths != "dense"
        width, chip = self.problem.head_dim_v, self.target.multiprocessors
        beside = 1 + self.problem.entropy
        more = {"beside": beside, "tile_rows": self.slice_rows}
        return Splitting(self.tile_n, width, chip, self.blocks, uneven, self.share, **more)

    @property
    def tile_copies(self) -> TileCopies:
        """Copies that bring a tile of keys."""
        rows = box_rows(self.problem, self.tile_n)
        gathers = self.tile_n // rows > self.most_boxes
        return TileCopies(rows, self.gather_warps if gathers else 0)

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        return expected_bound(self.problem, self.widths, self.work, self.target, size)

    # --- checks ---------------------------------------------------------------------------------------------

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes, registers, columns and barriers, and
        regions fit."""
        self.memory.check()
        self._check_room()
        self.check_threads()
        self.check_threshold()
        self.topology.check_fits(self.memory, self.target)

    def check_threads(self) -> None:
        """PlanError unless threads have their registers and columns of tensor memory."""
        raise NotImplementedError

    def check_threshold(self) -> None:
        check_threshold(self.rescale_threshold, self.problem)

    def _check_room(self) -> None:
        """PlanError unless all blocks of a multiprocessor have their shared memory."""
        room = room_of(self.blocks, self.target)
        if self.memory.total > room:
            raise PlanError(
                f"{self.blocks} blocks of {self.memory.total} bytes of shared memory",
                f"at most {room} bytes each",
                "use fewer stages",
            )

    # --- words ----------------------------------------------------------------------------------------------

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        rows, keys = self.tile
        lines = [
            f"forward kernel for {self.purpose}, {self.target.name} ({self.target.chip}):"
            f" {self.problem.explain()}",
            f"tile: all queries of {'some heads' if self.slice_rows else 'a group of heads'}, in {rows} rows,"
            f" x {keys} keys, q and k"
            f" {self.widths[0]} wide, v {self.widths[1]}, K and V {self.kv_stages} deep",
            *self.explain_rows(),
            self._explain_splits(),
            *self.explain_threads(),
            f"softmax: {rescaling(self.rescale_threshold)}",
            *(explain_skip(self.skip, "all rows") if self.skip else explain_exact(self.problem.skip)),
            *explain_pages(self.problem, self.tile_n, None, self.tile_copies.gather_warps),
            "shared memory:",
            self.memory.explain(),
            *self.explain_columns(),
            "pipeline:",
            self.topology.explain(),
            f"work: {self.work.explain()}",
            explain_bound(self.bound, size),
        ]
        return "\n".join(lines)

    def explain_rows(self) -> list[str]:
        """Places of the rows of a tile."""
        return []

    def explain_threads(self) -> list[str]:
        """Warps of a block and their registers."""
        raise NotImplementedError

    def explain_columns(self) -> list[str]:
        """The map of tensor memory."""
        return []

    def _explain_splits(self) -> str:
        by = (
            "by shapes" if self.share is None else f"{self.share * self.tile_n} to each, as the schedule asks"
        )
        return f"  {self.blocks} of them on a multiprocessor; keys are split between blocks, {by}"


def room_of(blocks: int, target: Target) -> int:
    """Shared memory of each of so many blocks of a multiprocessor."""
    return (target.shared_memory + RESERVED) // blocks - RESERVED


def blocks_and_stages(stages: range, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """Two blocks of a multiprocessor where these fit, so that one's loads run while the other begins or ends;
    else one. The most stages that fit: (blocks, stages)."""
    both = ((blocks, count) for blocks in (2, 1) for count in reversed(stages))
    return next((blocks, count) for blocks, count in both if fits(blocks, count))


def keys_of(widths: tuple[int, int]) -> int:
    """Keys of a tile."""
    return KEYS[max(widths) <= NARROW]


def share_of(request: ForwardRequest, tile_n: int) -> int | None:
    """Tiles of keys per split that the schedule asks for."""
    split = request.schedule.split
    return None if split is None else -(-split // tile_n)


def asks_for_order(schedule: Schedule) -> bool:
    """True if the schedule has what only kernels for many rows have a choice of: tiles, or an order."""
    return schedule.tile is not None or schedule.order != "auto" or schedule.next_tile != "auto"


def few_rows(problem: Problem, sizes: Sizes) -> bool:
    """True if a tile has all queries of a group of heads. Of packed sequences, all queries together are
    known, which says nothing of one. Kernels for many rows are right for few. Of latent rows, which all heads
    share, a tile has all queries of some heads."""
    if problem.keys.latent:
        return problem.lengths != "packed" and sizes.q.at_most(MOST_ROWS, right="no")
    return problem.lengths != "packed" and sizes.rows.at_most(MOST_ROWS, right="no")


def few_queries(problem: Problem, sizes: Sizes) -> bool:
    """True if a tile has all queries of some heads that share a KV head, or of all."""
    if few_rows(problem, sizes):
        return True
    return problem.lengths != "packed" and sizes.q.at_most(MOST_SLICED, right="no")


def slice_rows(sizes: Sizes, rows: int) -> int:
    """Rows of a tile, of `rows` at most, that has some heads of a group; 0 where it has all."""
    return 0 if sizes.rows.at_most(rows, right="no") else rows


def takes(problem: Problem, sizes: Sizes) -> bool:
    """True for few query rows whose key tiles are all or follow from spans. A mask may be asked in all
    tiles."""
    plain = problem.mask_form in ("none", "spans", "pairs") and "max_scores" not in problem.statistics
    return plain and few_queries(problem, sizes)
