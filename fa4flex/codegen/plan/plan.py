"""Plan: everything about a kernel that is decided before any of its code is written. Data only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.expr import TRUE, walk
from fa4flex.codegen.kernels.fwd_sm90.config import Config
from fa4flex.codegen.plan.bound import Bound, Size, expected_bound
from fa4flex.codegen.plan.fault import PlanError
from fa4flex.codegen.plan.memory import Memory
from fa4flex.codegen.plan.pipeline import Pipeline, Staging, forward_pipeline
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.registers import Need, Split, consumer_need, split_registers
from fa4flex.codegen.plan.simulate import round_robin, simulate
from fa4flex.codegen.plan.target import SM90A, Target
from fa4flex.codegen.plan.tiles import Tiles, choose, producer_computes
from fa4flex.codegen.plan.work import Work, count_work, is_plain
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.schedule import Schedule

Order = Literal["linear", "longest_first"]
MOST_SPANS = 2
PINGPONG_WIDEST = 128
RESCALE = 8.0
"""Log2 units by which a score may pass the maximum in use (FlashAttention-4's threshold)."""

MOST_RESCALE = {"float16": 15.0, "bfloat16": 64.0}
"""Largest threshold, in log2 units, at which no probability and no row sum overflows: a probability is
at most 2^threshold, which float16 must hold (its largest is 65504 < 2^16); bfloat16 has float32's range,
where sums over 2^31 keys stay finite up to a threshold of 96."""


@dataclass(frozen=True)
class Plan:
    """A forward kernel for `problem` on `target`: tiles and stages, registers, hand-over and order.

    pingpong             see pipeline.py
    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    persistent           one block per multiprocessor takes tile after tile; otherwise one block per tile
    dynamic              persistent blocks take the next tile when they are done, as tiles differ in work
    reasons              why these tiles, and why this order

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
    reasons: tuple[str, ...] = ()

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return self.tiles.memory(self.problem, self.kv_stages, self.target, self.dynamic)

    @cached_property
    def pipeline(self) -> Pipeline:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        staging: Staging = "none"
        if self.problem.lengths == "dense":
            staging = "queries" if self._shares else "own"
        return forward_pipeline(self.tiles, self.kv_stages, self.pingpong, staging, self.dynamic)

    @property
    def _shares(self) -> bool:
        return self.tiles.shares(self.problem, self.kv_stages, self.target)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers."""
        return consumer_need(self.tiles.tile_n, self.tiles.head_dim_v, self.work)

    def bound(self, size: Size) -> Bound:
        """The least time of a launch of this size, and the unit that sets it."""
        return expected_bound(self.problem, self.tiles, self.work, self.target, size)

    def config(self) -> Config:
        """What the hand-written kernel is built from."""
        return Config(
            head_dim=self.tiles.head_dim,
            head_dim_v=self.tiles.head_dim_v,
            tile_m=self.tiles.tile_m,
            tile_n=self.tiles.tile_n,
            kv_stages=self.kv_stages,
            producer_registers=self.registers.producer,
            consumer_registers=self.registers.consumer,
            pingpong=self.pingpong,
            rescale_threshold=self.rescale_threshold,
            alias_output=self._shares,
            persistent=self.persistent,
            dynamic=self.dynamic,
            workers=self.target.multiprocessors,
            longest_first=self.order == "longest_first",
            lengths=self.problem.lengths,
            tables=self.problem.mask_form == "tables",
            sinks=self.problem.sinks,
            statistics=self.problem.statistics,
        )

    def check(self) -> None:
        """PlanError or UnsupportedError unless the plan holds: sums of bytes, registers, barriers; regions;
        and a run of the token simulation."""
        self.memory.check()
        self.registers.check(self.tiles.consumers, self.target)
        if self.need.accumulators > self.registers.consumer:
            raise PlanError(
                f"{self.need.explain()} registers per consumer thread",
                f"at most {self.registers.consumer} for scores, probabilities and output",
                "use fewer keys per tile",
            )
        _check_threshold(self.rescale_threshold, self.problem)
        self._check_bytes()
        self.pipeline.check()
        highest = max((barrier.number for barrier in self.pipeline.barriers), default=0)
        if highest >= self.target.named_barriers:
            raise PlanError(
                f"named barrier {highest}",
                f"numbers below {self.target.named_barriers}",
                "use fewer consumers",
            )
        _prove(self.pipeline)

    def _check_bytes(self) -> None:
        needed: Counter[str] = Counter()
        for ring in self.pipeline.rings:
            needed[ring.region] += ring.stages * ring.stage_bytes
        sizes = {region.name: region.size for region in self.memory.regions}
        for name, size in needed.items():
            if size != sizes.get(name, 0):
                raise PlanError(
                    f"rings in region {name} of {size} bytes",
                    f"the {sizes.get(name, 0)} bytes of the region",
                    "lay the memory out anew",
                )
        barriers = 8 * sum(2 * ring.stages for ring in self.pipeline.rings)
        if barriers != sizes["barriers"]:
            raise PlanError(
                f"{barriers} bytes of mbarriers",
                f"the {sizes['barriers']} bytes of their region",
                "lay the memory out anew",
            )

    def explain(self, size: Size | None = None) -> str:
        """The plan in words; with a `size`, also the time it cannot beat there."""
        t, r = self.tiles, self.registers
        lines = [
            f"forward kernel for {self.target.name} ({self.target.chip}): {self.problem.explain()}",
            f"tile: {t.tile_m} queries x {t.tile_n} keys, q and k {t.head_dim} wide, v {t.head_dim_v},"
            f" K and V {self.kv_stages} deep",
            *(f"  {reason}" for reason in self.reasons),
            f"warpgroups: 1 producer, {t.consumers} consumers of {r.producer} and {r.consumer} registers",
            f"  a consumer needs about {self.need.explain()}",
            f"softmax: runs under the products of the next keys; {_PINGPONG[self.pingpong]};",
            f"  {self._rescaling()}",
            f"order: {_ORDERS[self.order]}; {_BLOCKS[self.persistent, self.dynamic]}",
            "shared memory:",
            self.memory.explain(),
            "pipeline:",
            self.pipeline.explain(),
            f"work: {self.work.explain()}",
            f"bound: {self._rates() if size is None else self.bound(size).explain()}",
        ]
        return "\n".join(lines)

    def _rescaling(self) -> str:
        if not self.rescale_threshold:
            return "maxima are taken and the output rescaled at every tile of keys"
        most = f"2^{self.rescale_threshold:g}"
        return f"maxima are raised and the output rescaled where a probability would pass {most}"

    def _rates(self) -> str:
        """Long rows of keys: what limits a score, whatever the lengths are."""
        times = self.bound(Size(1, 1, 1 << 20, 1 << 20)).explain()
        return times.split(" (")[0] + " for long sequences"


@lru_cache(maxsize=256)
def _prove(pipeline: Pipeline) -> None:
    """PlanError unless a short row of key tiles, and one that goes twice round the rings, run to their end.
    One interleaving costs a few milliseconds, once per pipeline; tests try many."""
    twice = 2 * max(ring.stages for ring in pipeline.rings) + 1
    simulate(pipeline, [1, twice], round_robin())


_PINGPONG = {True: "consumers take turns at the tensor cores", False: "consumers issue products freely"}
_BLOCKS = {
    (True, False): "one block per multiprocessor takes tiles in turn",
    (True, True): "one block per multiprocessor takes the next tile from a counter",
    (False, False): "one block per tile",
}
_ORDERS = {
    "linear": "tiles of queries from the first to the last",
    "longest_first": "tiles of queries from the last, which has most keys, to the first, for balance",
}


def plan_forward(
    facts: Facts,
    problem: Problem,
    target: Target = SM90A,
    schedule: Schedule = Schedule(),
    rescale_threshold: float | None = None,
) -> Plan:
    """Facts, problem and chip -> a checked Plan.

    `rescale_threshold` t is in log2 units. The softmax may use a maximum that lags behind the true one, which
    is the idea of FlashAttention-4's conditional rescaling. Here it is raised only where some score of a
    warp's rows passes a ceiling, the maximum in use + t: most tiles then need neither a reduction over lanes
    nor a rescaling. Probabilities are at most 2^t instead of 1, and the final division undoes it. t = 8 is
    safe for both dtypes that hold probabilities: 2^8 is far below float16's 65504, bfloat16 has float32's
    range, both keep their relative precision, small probabilities only move away from underflow, and sums
    are float32. None means RESCALE, and 0 where `max_scores` is asked for: then the maximum in use must be
    the true one.

    Raises UnsupportedError for what the chip or kernel does not have, InputError where facts and problem
    contradict each other.
    """
    _require_consistent(facts, problem)
    work = count_work(facts, problem)
    choice = choose(problem, work, is_plain(facts, problem), target, schedule.tile)
    tiles = choice.tiles
    order, why = _order(facts, problem, schedule)
    plan = Plan(
        target=target,
        problem=problem,
        tiles=tiles,
        kv_stages=choice.kv_stages,
        registers=split_registers(tiles.consumers, producer_computes(problem, work)),
        # Wider heads spend so long in products that turns only add waiting (FlashAttention-3's rule).
        pingpong=tiles.consumers > 1 and tiles.head_dim <= PINGPONG_WIDEST,
        order=order,
        rescale_threshold=_threshold(rescale_threshold, problem),
        work=work,
        dynamic=problem.uneven,
        reasons=(*choice.reasons, why),
    )
    plan.check()
    return plan


def _threshold(given: float | None, problem: Problem) -> float:
    if given is None:
        return 0.0 if "max_scores" in problem.statistics else RESCALE
    _check_threshold(given, problem)
    return float(given)


def _check_threshold(given: float, problem: Problem) -> None:
    most = MOST_RESCALE[problem.dtype]
    if not 0 <= given <= most:
        raise UnsupportedError(
            f"rescale_threshold={given} with {problem.dtype} probabilities",
            f"0 to {most:g}: beyond, probabilities or their sums could overflow",
            f"use {RESCALE:g}, or 0 to take the maxima of every tile of keys",
        )
    if given and "max_scores" in problem.statistics:
        raise UnsupportedError(
            f"rescale_threshold={given} with max_scores: the maximum in use lags behind the true one",
            "a threshold of 0 where max_scores is written",
            "pass rescale_threshold=0, or None to let the planner choose",
        )


def _order(facts: Facts, problem: Problem, schedule: Schedule) -> tuple[Order, str]:
    if schedule.order != "auto":
        order: Order = "linear" if schedule.order == "row_major" else "longest_first"
        return order, f"{order} order: the schedule asks for it"
    if problem.mask_form == "tables":
        return "longest_first", "longest_first order: rows of a block table differ in length"
    if problem.mask_form == "spans" and facts.keys is not None:
        ends = [hi for _, hi in facts.keys.spans if "q" in hi.free]
        if ends:
            return "longest_first", f"longest_first order: keys end at {ends[0]}, later for later queries"
    return "linear", "linear order: no row of queries has more keys than another by its place"


def _require_consistent(facts: Facts, problem: Problem) -> None:
    """The problem must say about the mask and the captured tensors what the facts say."""
    if problem.mask_form == "none" and facts.mask is not TRUE:
        raise InputError(
            'mask_form="none" with a mask', "a mask that is true everywhere", 'use "spans" or "tables"'
        )
    if problem.mask_form == "spans":
        if facts.keys is None:
            raise InputError(
                'mask_form="spans" for a mask without key intervals', "Facts.keys to be found", 'use "tables"'
            )
        if len(facts.keys.spans) > MOST_SPANS:
            raise UnsupportedError(
                f"a mask of {len(facts.keys.spans)} key intervals per row",
                f"at most {MOST_SPANS}",
                'use mask_form="tables"',
            )
    for node in walk(facts.score, facts.mask):
        if node.op == "load":
            _require_operand(node.value, len(node.args), problem)


def _require_operand(slot: int, rank: int, problem: Problem) -> None:
    known = problem.operands[slot][1] if slot < len(problem.operands) else None
    if known != rank:
        raise InputError(
            f"captured tensor {slot}, indexed by {rank} numbers, but the problem has "
            + ("no such tensor" if known is None else f"rank {known} for it"),
            "one (dtype name, rank) per captured tensor of the variant",
            "pass operands in order of the variant's slots",
        )
