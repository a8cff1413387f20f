"""What a plan is asked for, settled as far as it is the same on every chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.intervals import MOST_SPANS
from fa4flex.codegen.expr import TRUE, walk
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import Target
from fa4flex.codegen.plan.work import Work, count_work
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.schedule import NextTile, Schedule

Order = Literal["linear", "longest_first", "by_work"]
RESCALE = 8.0
"""Log2 units by which a score may pass the maximum in use (FlashAttention-4's threshold)."""

MOST_RESCALE = {"float16": 15.0, "bfloat16": 64.0}
"""Largest threshold, in log2 units, at which no probability and no row sum overflows: a probability is
at most 2^threshold, which float16 must hold (its largest is 65504 < 2^16); bfloat16 has float32's range,
where sums over 2^31 keys stay finite up to a threshold of 96."""

ORDERS = {
    "linear": "tiles of queries from the first to the last",
    "longest_first": "tiles of queries from the last, which has most keys, to the first, for balance",
    "by_work": "tiles of queries sorted by their keys, over all sequences, most first, for balance",
}

BLOCKS = {
    (True, False): "one block per multiprocessor takes tiles in turn",
    (True, True): "one block per multiprocessor takes the next tile from a counter",
    (False, False): "one block per tile",
    (False, True): "one block per tile, and a counter that hands out no more",
}
"""By whether blocks are persistent, and whether they take tiles from a counter."""

CANCELLING = "one block per tile; those that run take over tiles of those that have not started"


@dataclass(frozen=True)
class Request:
    """tile, next_tile      what the user's schedule asks for: a tile, or None
    order, why           of tiles of queries
    rescale_threshold    log2 units by which a score may pass the maximum in use before that is raised
    work                 what the hooks cost and keep
    """

    facts: Facts
    problem: Problem
    target: Target
    tile: tuple[int, int] | None
    order: Order
    why: str
    rescale_threshold: float
    work: Work
    next_tile: NextTile = "auto"

    @staticmethod
    def of(
        facts: Facts, problem: Problem, target: Target, schedule: Schedule, rescale_threshold: float | None
    ) -> Request:
        """Raises UnsupportedError and InputError as `plan_forward` does."""
        _require_consistent(facts, problem)
        order, why = _order(facts, problem, schedule)
        threshold = _threshold(rescale_threshold, problem)
        work = count_work(facts, problem)
        return Request(facts, problem, target, schedule.tile, order, why, threshold, work, schedule.next_tile)


def rescaling(threshold: float) -> str:
    if not threshold:
        return "maxima are taken and the output rescaled at every tile of keys"
    return f"maxima are raised and the output rescaled where a probability would pass 2^{threshold:g}"


def _threshold(given: float | None, problem: Problem) -> float:
    if given is None:
        return 0.0 if "max_scores" in problem.statistics else RESCALE
    check_threshold(given, problem)
    return float(given)


def check_threshold(given: float, problem: Problem) -> None:
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
    if schedule.order == "longest_first" and problem.lengths != "dense":
        return "by_work", "by_work order: the schedule asks for longest_first, and sequences differ in length"
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
    if problem.mask_form == "queries":
        raise InputError(
            'mask_form="queries" in a forward pass',
            "tiles of queries that visit keys",
            'use "spans" or "tables"',
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
