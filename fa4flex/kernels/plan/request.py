"""Request for a plan, settled as far as it is the same on every chip."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.intervals import MOST_SPANS
from fa4flex.codegen.expr import TRUE, walk
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import UNKNOWN, Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.work import Work, count_work
from fa4flex.primitives.schedule import Schedule

Order = Literal["linear", "longest_first", "by_work"]
RESCALE = 8.0
"""Log2 units by which a score may pass the maximum in use (FlashAttention-4's threshold)."""

MOST_RESCALE = {"float16": 15.0, "bfloat16": 64.0, "float8_e4m3fn": 0.0}
"""Largest threshold, in log2 units, at which no probability and no row sum overflows: a probability is
at most 2^threshold, which float16 must hold (its largest is 65504 < 2^16); bfloat16 has float32's range,
where sums over 2^31 keys stay finite up to a threshold of 96. e4m3 ends at 448, and probabilities fill it."""

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
"""Words for how blocks take tiles, by whether blocks are persistent and whether they use a counter."""


def taking(persistent: bool, dynamic: bool, blocks: int) -> str:
    """Words for how blocks take tiles where so many share a multiprocessor."""
    told = BLOCKS[persistent, dynamic]
    return (
        told
        if blocks == 1
        else told.replace("one block per multiprocessor takes", f"{blocks} blocks per multiprocessor take")
    )


CANCELLING = "one block per tile; those that run take over tiles of those that have not started"


@dataclass(frozen=True)
class Request:
    """A kernel for `problem` on `target`, as the user's schedule asks for it, for a call of these sizes."""

    facts: Facts
    problem: Problem
    target: Target
    schedule: Schedule = Schedule()
    sizes: Sizes = UNKNOWN


@dataclass(frozen=True)
class ForwardRequest(Request):
    """threshold    log2 units by which a score may pass the maximum in use before that is raised. None means
                 RESCALE, and 0 where `max_scores` is asked for: then the maximum in use must be the true one

    The softmax may use a maximum that lags behind the true one, which is the idea of FlashAttention-4's
    conditional rescaling. Here it is raised only where some score of a warp's rows passes a ceiling, the
    maximum in use + t: most tiles then need neither a reduction over lanes nor a rescaling. Probabilities are
    at most 2^t instead of 1, and the final division undoes it. t = 8 is safe for both dtypes that hold
    probabilities: 2^8 is far below float16's 65504, bfloat16 has float32's range, both keep their relative
    precision, small probabilities only move away from underflow, and sums are float32.

    Raises UnsupportedError for a threshold that overflows, InputError where facts and problem contradict each
    other.
    """

    threshold: float | None = None

    def __post_init__(self) -> None:
        _require_consistent(self.facts, self.problem)
        if self.threshold is not None:
            check_threshold(self.threshold, self.problem)

    @property
    def rescale_threshold(self) -> float:
        if self.threshold is None:
            most = MOST_RESCALE[self.problem.weight_dtype]
            return 0.0 if "max_scores" in self.problem.statistics else min(RESCALE, most)
        return float(self.threshold)

    @cached_property
    def work(self) -> Work:
        """Work of the hooks."""
        return count_work(self.facts, self.problem)

    @property
    def order(self) -> Order:
        """Order of the tiles of queries."""
        return self._ordered[0]

    @property
    def why(self) -> str:
        """The reason of this order."""
        return self._ordered[1]

    @cached_property
    def _ordered(self) -> tuple[Order, str]:
        return _order(self.facts, self.problem, self.schedule)


def rescaling(threshold: float) -> str:
    if not threshold:
        return "maxima are taken and the output rescaled at every tile of keys"
    return f"maxima are raised and the output rescaled where a probability would pass 2^{threshold:g}"


def check_threshold(number: float, problem: Problem) -> None:
    most = MOST_RESCALE[problem.weight_dtype]
    if not 0 <= number <= most:
        raise UnsupportedError(
            f"rescale_threshold={number} with {problem.weight_dtype} probabilities",
            f"0 to {most:g}: beyond, probabilities or their sums could overflow",
            f"use {RESCALE:g}, or 0 to take the maxima of every tile of keys",
        )
    if number and "max_scores" in problem.statistics:
        raise UnsupportedError(
            f"rescale_threshold={number} with max_scores: the maximum in use lags behind the true one",
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
