"""Base of the plans of kernels for listed keys: copies, splits, regions of shared memory, words."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.lists.config import MOST_ENTRIES, TABLE, UNITED, WORDS, ListsConfig
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.few_rows import FewRowsPlan, asks_for_order
from fa4flex.kernels.plan.memory import NUMBER
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.topology import WARPGROUP
from fa4flex.primitives.heads import ALIKE


class ListedPlan(FewRowsPlan):
    """A plan whose tiles have the queries of `united` rows of the lists, and `rows` rows."""

    united: int

    purpose: ClassVar[str] = "listed keys"

    @property
    def skip(self) -> float:
        return 0.0

    def config(self) -> ListsConfig:
        """Configuration of the hand-written kernel."""
        raise NotImplementedError

    @property
    def tile_copies(self) -> TileCopies:
        """Copies that bring a tile of keys: rows one by one."""
        return TileCopies(1, WARPGROUP)

    @property
    def splitting(self) -> Splitting | None:  # type: ignore[override]  # packed queries are not split
        if not self.config().splits:
            return None
        # A block that is alone on a multiprocessor waits for what it has asked for, and not for the chip.
        room = self.target.multiprocessors * self.blocks
        return replace(super().splitting, multiprocessors=room, blocks=1, tile_rows=self.rows)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words. Bounds follow from what is listed, which no size tells."""
        return super().explain()

    def explain_rows(self) -> list[str]:
        shared = "queries that share a list" if self.united == 1 else f"queries of {self.united} lists"
        return [
            f"  rows: {shared}, of up to {self.rows} heads that share keys",
            *["  lists are united: a unit comes once for all of them"] * (self.united > 1),
            f"  keys: those of up to {MOST_ENTRIES} entries of a list, each unit once; {WARPGROUP} warps"
            " gather, 16 bytes a lane" + "; then sinks, window and tail" * self.problem.keys.beside,
        ]


def entry_sizes(tile_n: int, kv_stages: int, united: int) -> dict[str, int]:
    """Bytes of shared memory for what is known of entries and of the keys of tiles."""
    return {
        "ids": NUMBER * tile_n * kv_stages * (1 + (united > 1)),
        "bits": NUMBER * WORDS,
        "united": NUMBER * UNITED * (united > 1),
    }


def behind(tiles: int) -> int:
    """Bytes of the table of entries that lie behind tiles of so many bytes."""
    return max(NUMBER * TABLE - tiles, 0)


def check_schedule(request: ForwardRequest) -> None:
    """Raises UnsupportedError for schedules that ask for tiles or an order."""
    if asks_for_order(request.schedule):
        raise UnsupportedError(
            f"{request.schedule!r} with lists of keys",
            "a Schedule without tile, order and next_tile",
            "leave them out",
        )


def takes_lists(problem: Problem) -> bool:
    """True for listed keys with masks, statistics and heads that kernels for them have."""
    if not problem.keys.listed:
        return False
    packed = problem.lengths == "packed"
    known = set(problem.statistics) <= ({"lse"} if packed else {"lse", "max_logit", "entropy"})
    masks = problem.mask_form in ("none", "spans", "pairs")
    return known and masks and problem.shares == ALIKE
