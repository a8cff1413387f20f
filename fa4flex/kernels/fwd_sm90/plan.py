"""The plan of a Hopper forward kernel. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fa4flex.codegen.expr import const
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.cost import exposed_share, forward_units
from fa4flex.kernels.fwd_sm90.packing import packed_heads
from fa4flex.kernels.fwd_sm90.registers import Need, Split, consumer_need, split_registers
from fa4flex.kernels.fwd_sm90.tiles import Choice, Pair, Tiles, choose, producer_computes, staged
from fa4flex.kernels.fwd_sm90.topology import forward_topology
from fa4flex.kernels.plan.bound import Bound, Size, expected_bound, explain_bound
from fa4flex.kernels.plan.candidates import among, least, listed
from fa4flex.kernels.plan.constants import constants_of
from fa4flex.kernels.plan.forward_time import ForwardTime
from fa4flex.kernels.plan.kernel_time import Heads, many
from fa4flex.kernels.plan.memory import Memory
from fa4flex.kernels.plan.paging import Boxes, Producing, boxes_of, explain_pages, producing
from fa4flex.kernels.plan.pipeline import EVERY, Checked, Pipeline
from fa4flex.kernels.plan.problem import MMA_K, Problem
from fa4flex.kernels.plan.request import ORDERS, ForwardRequest, Order, check_threshold, rescaling, taking
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.skipping import explain_skip, skipping
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Staging, Topology
from fa4flex.kernels.plan.walks import Form
from fa4flex.kernels.plan.work import Work

PINGPONG_WIDEST = 128
"""The widest heads of which consumers take turns at the tensor cores. Wider heads spend so long in products
that turns only add waiting (FlashAttention-3's rule)."""

SHORT_WAVES = 1.5
"""Tiles of heads of few keys that are computed next to each other, at least, for each multiprocessor."""


@dataclass(frozen=True)
class HopperPlan(Checked):
    """A forward kernel for `problem` on `target`: tiles and stages, registers, hand-over and order.

    pingpong             see topology.py
    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    persistent           one block per multiprocessor takes tile after tile; otherwise one block per tile
    dynamic              persistent blocks take the next tile when they are done, as tiles differ in work
    packed_heads         query heads that share a KV head, of which tiles of queries have rows; 1: each
                         head has tiles of its own
    reasons              why these tiles, and why this order
    form                 which pairs the mask allows
    others               tiles of queries and keys that these were chosen among
    rows_alone           bits of a row may not depend on rows beside it, as the schedule fixes parts of keys

    Memory map, pipeline and estimates follow from these: `dataclasses.replace` makes a consistent other plan,
    and `check` says whether it is a legal one.
    """

    target: Target
    problem: Problem
    tiles: Tiles
    kv_stages: int
    registers: Split
    pingpong: bool
    order: Order
    rescale_threshold: float
    work: Work
    persistent: bool = True
    dynamic: bool = False
    packed_heads: int = 1
    reasons: tuple[str, ...] = ()
    form: Form = "other"
    others: tuple[Pair, ...] = ()
    rows_alone: bool = False

    module: ClassVar[str] = "fa4flex.kernels.fwd_sm90"

    @property
    def by_groups(self) -> bool:
        return not self.rows_alone

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiles.tile_m, self.tiles.tile_n

    @property
    def splitting(self) -> Splitting | None:
        """None: each block has all keys of a tile."""
        return None

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return self.tiles.memory(self.problem, self.kv_stages, self.target, self.dynamic)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        staging: Staging = "none"
        if staged(self.problem):
            staging = "queries" if self._shares else "own"
        topology = forward_topology(
            self.tiles, self.kv_stages, self.pingpong, staging, self.dynamic, self.boxes, self.producing
        )
        return skipping(topology, self.config().passes) if self.problem.skip else topology

    @property
    def producing(self) -> Producing:
        """Producer warps, and what they bring."""
        return producing(self.problem, self.tiles.tile_n)

    @property
    def boxes(self) -> Boxes | None:
        """Keys and columns that one TMA copy brings; None where keys do not lie in pages."""
        return boxes_of(self.problem, self.tiles.tile_n) if self.problem.keys.loaded else None

    @property
    def _shares(self) -> bool:
        return self.tiles.shares(self.problem, self.kv_stages, self.target)

    @cached_property
    def time(self) -> ForwardTime:
        """The model of the time of a call."""
        return self.time_with(self.tiles)

    def time_with(self, tiles: Tiles) -> ForwardTime:
        """The same with other tiles."""
        return time_of(tiles, self.problem, self.work, self.target, self.form, self.packed_heads)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers."""
        return consumer_need(self.tiles.tile_n, self.tiles.head_dim_v, self.work, self.problem.keys.codes)

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        # Products of 8 bits take half the time of as many of 16.
        widths = self.problem.depths[0] * MMA_K, self.tiles.head_dim_v * self.tiles.v_itemsize // 2
        return expected_bound(self.problem, widths, self.work, self.target, size)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return Config(
            head_dim=self.tiles.head_dim,
            head_dim_v=self.tiles.head_dim_v,
            depth=self.problem.depths[0],
            tile_m=self.tiles.tile_m,
            tile_n=self.tiles.tile_n,
            q_stages=self.tiles.q_stages,
            kv_stages=self.kv_stages,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            pingpong=self.pingpong,
            rescale_threshold=self.rescale_threshold,
            alias_output=self._shares,
            persistent=self.persistent,
            dynamic=self.dynamic,
            workers=self.target.multiprocessors * self.tiles.blocks,
            longest_first=self.order == "longest_first",
            lengths=self.problem.lengths,
            boxes=self.boxes,
            producing=self.producing,
            one_body=self.problem.many_reads,
            tables=self.problem.mask_form == "tables",
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
            row_ends=self.problem.row_ends,
            divisors=self.tiles.narrow and not self.problem.keys.loaded,
            short_tiles=int(SHORT_WAVES * self.target.multiprocessors * self.tiles.blocks),
            group=self.packed_heads,
            skip=self.problem.skip,
            blocks=self.tiles.blocks,
        )

    def check_resources(self) -> None:
        """PlanError or UnsupportedError unless sums of bytes, registers and barriers, and regions fit."""
        self.memory.check()
        self.registers.check(self.tiles.consumers, self.target, self.tiles.blocks)
        self.need.check(self.registers.consumer)
        check_threshold(self.rescale_threshold, self.problem)
        self.topology.check_fits(self.memory, self.target)

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        t = self.tiles
        lines = [
            f"forward kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {t.tile_m} queries x {t.tile_n} keys, q and k {t.head_dim} wide, v {t.head_dim_v},"
            f" K and V {self.kv_stages} deep" + f", queries {t.q_stages}" * (t.q_stages > 1),
            *self._explain_rows(),
            *(f"  {reason}" for reason in self.reasons),
            *self.explain_warpgroups(),
            f"  a consumer needs about {self.need.explain()}",
            *self.explain_products(),
            *self.explain_softmax(),
            f"  {rescaling(self.rescale_threshold)}",
            *explain_skip(self.problem.skip, "a warpgroup's 64 rows"),
            f"order: {ORDERS[self.order]}; {taking(self.persistent, self.dynamic, t.blocks)}",
            *self._explain_pages(),
            "shared memory:",
            self.memory.explain(),
            "pipeline:",
            self.topology.explain(),
            f"work: {self.work.explain()}",
            *self._explain_candidates(size),
            explain_bound(self.bound, size),
        ]
        return "\n".join(lines)

    def explain_warpgroups(self) -> list[str]:
        """Warpgroups of a block, and their registers."""
        n, r = self.tiles.consumers, self.registers
        return [f"warpgroups: 1 producer, {n} consumers of {r.producer} and {r.consumer} registers"]

    def explain_softmax(self) -> list[str]:
        """Line that says what runs beside the softmax."""
        return [f"softmax: runs under the products of the next keys; {_PINGPONG[self.pingpong]};"]

    def explain_products(self) -> list[str]:
        """Dtypes of products and sums, where they are others than those of tensors, and float32."""
        return []

    def _explain_candidates(self, size: Size | None) -> list[str]:
        if size is None:
            return []

        def at(tile: Pair) -> ForwardTime:
            return self.time_with(replace(self.tiles, tile_m=tile[0], tile_n=tile[1]))

        of_call = Heads(size.b, size.h, size.kv_heads or size.h, size.q_len, size.kv_len)
        ways = among(self.others or (self.tile,), _named, lambda tile: at(tile).predict(of_call))
        return listed(ways, self.tile, constants_of(self.target).origin)

    def _explain_pages(self) -> list[str]:
        warps = self.config().gather_warps
        apart = ["a second producer warp brings the values"] * (self.producing == "apart")
        return [*explain_pages(self.problem, self.tiles.tile_n, self.boxes, warps), *apart]

    def _explain_rows(self) -> list[str]:
        group = self.packed_heads
        told = f"  queries are rows of {group} heads that share a KV head, all heads of one after another"
        return [told] * (group > 1)


_PINGPONG = {True: "consumers take turns at the tensor cores", False: "consumers issue products freely"}


def plan_hopper(request: ForwardRequest, kind: type[HopperPlan] = HopperPlan) -> HopperPlan:
    problem, work = request.problem, request.work
    if problem.keys.loaded and request.order == "by_work":
        raise UnsupportedError(
            "keys in pages, with tiles of queries sorted by their keys",
            'a schedule without order="longest_first"',
            "nothing: pages are gathered instead",
        )
    packed, form = packed_heads(request), form_of(request)
    choices = choose(request)
    choice = choices[0] if len(choices) == 1 else _least(request, choices, form, packed)
    tiles = choice.tiles
    return kind(
        target=request.target,
        problem=problem,
        tiles=tiles,
        kv_stages=choice.kv_stages,
        registers=split_registers(tiles.consumers, producer_computes(problem, work), tiles.blocks),
        pingpong=tiles.consumers > 1 and tiles.head_dim <= PINGPONG_WIDEST,
        order=request.order,
        rescale_threshold=request.rescale_threshold,
        work=work,
        dynamic=takes_next(request),
        packed_heads=packed,
        reasons=(*choice.reasons, request.why),
        form=form,
        others=tuple((one.tiles.tile_m, one.tiles.tile_n) for one in choices),
        rows_alone=request.schedule.split is not None,
    )


def time_of(
    tiles: Tiles, problem: Problem, work: Work, target: Target, form: Form, packed: int
) -> ForwardTime:
    """The model of the time of a kernel with these tiles."""
    units = forward_units(tiles, problem, work, target)
    rates = constants_of(target).forward
    return ForwardTime(
        target,
        form,
        (tiles.tile_m, tiles.tile_n),
        (problem.head_dim, problem.head_dim_v),
        units,
        exposed_share(units, tiles.consumers * tiles.blocks, rates.exposed),
        least=int(SHORT_WAVES * target.multiprocessors * tiles.blocks),
        packed_heads=packed,
    )


def form_of(request: ForwardRequest) -> Form:
    """The pairs that the mask allows, as far as a plan knows: those up to a key that rises with the query,
    if its keys are one interval from the first one on."""
    if request.problem.mask_form == "none":
        return "full"
    keys = request.facts.keys
    if request.problem.mask_form != "spans" or keys is None:
        return "other"
    rising = all(lo is const(0) and "q" in hi.free for lo, hi in keys.spans)
    return "causal" if rising else "other"


def _least(request: ForwardRequest, choices: tuple[Choice, ...], form: Form, packed: int) -> Choice:
    """The choice that takes least. Of packed sequences, of which all queries together are known, nothing is
    known of rows past the end of each; and rows of a group of heads fill tiles: then the first one."""
    sizes, problem, target = request.sizes, request.problem, request.target
    if problem.lengths == "packed" or packed > 1:
        return choices[0]
    shortest = min(choices, key=lambda one: one.tiles.tile_m)
    at_once = target.multiprocessors // max(sizes.heads, 1)
    most = at_once * shortest.tiles.tile_m
    if sizes.batch.at_most(1, right="any") and sizes.q.at_most(most, right="any"):
        return shortest  # all tiles of a prompt run at the same time: it takes as long as one of them
    error = constants_of(target).forward.error
    times = [time_of(one.tiles, problem, request.work, target, form, packed) for one in choices]

    def decide(q_len: int) -> int:
        size = many(sizes.heads, sizes.group, q_len)
        return least([one.predict(size).seconds for one in times], error)

    return choices[sizes.chosen(decide, len(choices))]


def _named(tile: Pair) -> str:
    return f"{tile[0]} queries x {tile[1]} keys"


def takes_next(request: ForwardRequest) -> bool:
    """True if blocks take the next tile from a counter. Raises UnsupportedError for ways that only other
    chips have."""
    following = request.schedule.next_tile
    if following == "launch_control":
        raise UnsupportedError(
            f'next_tile="launch_control" on {request.target.name}',
            "a Blackwell GPU: earlier ones cannot cancel blocks that wait",
            'use Schedule(next_tile="counter"), which balances as well, or leave it at "auto"',
        )
    return request.problem.uneven if following == "auto" else following == "counter"


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True unless the mask is asked in all tiles, as kernels for few rows do."""
    return target.family == "sm90" and problem.mask_form != "pairs"


FWD_SM90 = Pipeline(
    "Hopper forward",
    "forward",
    accepts,
    plan_hopper,
    writes_float32=True,
    applies_output=True,
    drops=True,
    weights=EVERY,
)
