"""The plan of the Hopper kernel for listed latent rows: what it accepts, shared memory, splits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.lists.config import MOST_ENTRIES, WORDS
from fa4flex.kernels.lists_sm90.plan import accepts_lists
from fa4flex.kernels.mla_decode_sm90.config import BLOCKS, PIECE, ROWS
from fa4flex.kernels.mla_decode_sm90.plan import LatentPlan, has_pieces, memory_of, plan_rows
from fa4flex.kernels.mla_lists_sm90.config import GATHER_WARPS, Config
from fa4flex.kernels.mla_lists_sm90.topology import listed_rows_topology
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.memory import NUMBER, Memory
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import WIDEST_SHARED, Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology


@dataclass(frozen=True, kw_only=True)
class ListedRowsPlan(LatentPlan):
    """The plan of `mla_lists_sm90`."""

    module: ClassVar[str] = "fa4flex.kernels.mla_lists_sm90"
    purpose: ClassVar[str] = "listed latent rows"
    united: ClassVar[int] = 1
    """Rows of the lists whose queries a tile has."""

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        known = {"ids": NUMBER * self.tile_n, "bits": NUMBER * WORDS}
        return memory_of(self, known, 2 * BLOCKS)

    @property
    def tile_copies(self) -> TileCopies:
        """Copies that bring a piece of a block: rows one by one."""
        return TileCopies(1, GATHER_WARPS)

    @property
    def splitting(self) -> Splitting | None:  # type: ignore[override]  # packed queries are not split
        return super().splitting if self.config().splits else None

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        config = self.config()
        return listed_rows_topology(config.pieces, config.own)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        plain = super().config()
        given = {one.name: getattr(plain, one.name) for one in fields(plain)}
        return Config(**{**given, "box_rows": 1}, beside=self.problem.keys.beside)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words. Bounds follow from what is listed, which no size tells."""
        return super().explain()

    def explain_rows(self) -> list[str]:
        return [
            f"  rows: queries that share a list, of up to {ROWS} heads; more of them are more tiles, each of"
            " which gathers the list",
            f"  keys: those of up to {MOST_ENTRIES} entries of a list, each unit once; {GATHER_WARPS} warps"
            f" gather {BLOCKS} blocks in pieces of {PIECE} columns, 16 bytes a lane; a row is key and value"
            + "; then sinks, window and tail"
            * self.problem.keys.beside,
        ]


def plan_listed_rows(request: ForwardRequest) -> ForwardPlan:
    """Raises UnsupportedError for schedules that ask for tiles or an order."""
    return plan_rows(request, ListedRowsPlan)


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    plain = set(problem.statistics) <= {"lse"}
    return plain and has_pieces(problem) and accepts_lists(problem, target, sizes)


MLA_LISTS_SM90 = Pipeline(
    "Hopper forward, listed latent rows",
    "forward",
    accepts,
    plan_listed_rows,
    writes_float32=True,
    latent=True,
    listed=True,
    widest=WIDEST_SHARED,
)
