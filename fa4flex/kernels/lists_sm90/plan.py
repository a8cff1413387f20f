"""The plan of the Hopper kernel for listed keys: tiles, stages, registers, splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.kernels.decode_sm90.plan import SPLITS, STAGES, DecodePlan
from fa4flex.kernels.fwd_sm90.registers import Split
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.lists.config import ROWS
from fa4flex.kernels.lists.plan import ListedPlan, behind, check_schedule, entry_sizes, takes_lists
from fa4flex.kernels.lists_sm90.config import Config
from fa4flex.kernels.lists_sm90.topology import lists_topology
from fa4flex.kernels.plan.few_rows import blocks_and_stages, keys_of, room_of, share_of
from fa4flex.kernels.plan.keys import ListedKeys
from fa4flex.kernels.plan.memory import Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology

TWO = Split(40, 232)
"""Registers of a producer that finds keys, and of each of two consumers."""


@dataclass(frozen=True, kw_only=True)
class ListsPlan(ListedPlan, DecodePlan):
    """The plan of `lists_sm90`.

    consumers    warpgroups that share the keys of a tile, with ROWS rows each
    united       rows of the lists whose queries a tile has
    """

    consumers: int = 1
    united: int = 1

    module: ClassVar[str] = "fa4flex.kernels.lists_sm90"

    @property
    def rows(self) -> int:  # type: ignore[override]  # other kernels' is the same for all plans
        """Rows of a tile."""
        return ROWS * self.consumers

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.target, (self.tile_n, self.kv_stages, self.consumers), self.united)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        return lists_topology(*self.widths, self.tile_n, self.kv_stages, self.consumers, self.united)

    def config(self) -> Config:  # type: ignore[override]
        """Configuration of the hand-written kernel."""
        return Config(
            head_dim=self.widths[0],
            head_dim_v=self.widths[1],
            tile_n=self.tile_n,
            kv_stages=self.kv_stages,
            blocks=self.blocks,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            rescale_threshold=self.rescale_threshold,
            lengths=self.problem.lengths,
            paged=self.problem.keys.loaded,
            beside=self.problem.keys.beside,
            share=self.share,
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            consumers=self.consumers,
            united=self.united,
        )

    def check_registers(self) -> None:
        self.registers.check(self.consumers, self.target, self.blocks)

    def explain_threads(self) -> list[str]:
        if self.consumers == 1:
            return super().explain_threads()
        r = self.registers
        return [
            f"warpgroups: 1 producer, {self.consumers} consumers of {r.producer} and {r.consumer} registers,"
            f" which share keys and have {ROWS} rows each",
            f"  a consumer needs about {self.need.explain()}",
        ]


def _memory(problem: Problem, target: Target, sizes: tuple[int, int, int], united: int) -> Memory:
    """The shared-memory map for so many keys of a tile, stages and consumers."""
    tile_n, kv_stages, consumers = sizes
    d, dv, size = pad(problem.head_dim), pad(problem.head_dim_v), problem.itemsize
    regions = {
        **entry_sizes(tile_n, kv_stages, united),
        "q": tile_bytes(ROWS * consumers, d, size),
        "k": tile_bytes(tile_n, d, size) * kv_stages,
        "v": tile_bytes(tile_n, dv, size) * kv_stages,
    }
    regions["behind"] = behind(regions["k"] + regions["v"])
    return lay_out(regions, {}, 6 * kv_stages, target)


def plan_lists(request: ForwardRequest) -> ForwardPlan:
    """Raises UnsupportedError for schedules that ask for tiles or an order."""
    check_schedule(request)
    problem, target = request.problem, request.target
    assert isinstance(problem.keys, ListedKeys)
    consumers, united = 2 if problem.keys.many else 1, problem.keys.united
    tile_n = keys_of((pad(problem.head_dim), pad(problem.head_dim_v)))

    def fits(blocks: int, stages: int) -> bool:
        memory = _memory(problem, target, (tile_n, stages, consumers), united)
        # Two blocks of two consumers would have half as many registers for each.
        return blocks * consumers <= 2 and memory.total <= room_of(blocks, target)

    blocks, stages = blocks_and_stages(STAGES, fits)
    return ListsPlan(
        target=target,
        problem=problem,
        tile_n=tile_n,
        kv_stages=stages,
        blocks=blocks,
        registers=SPLITS[blocks] if consumers == 1 else TWO,
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, tile_n),
        consumers=consumers,
        united=united,
    )


def accepts_lists(problem: Problem, target: Target, sizes: Sizes) -> bool:
    return target.family == "sm90" and takes_lists(problem)


LISTS_SM90 = Pipeline(
    "Hopper forward, listed keys",
    "forward",
    accepts_lists,
    plan_lists,
    writes_float32=True,
    weights=("softmax", "elementwise"),
    listed=True,
)
