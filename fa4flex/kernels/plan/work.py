"""Work: what one score costs besides the matrix products, counted from the variant's expressions.

Rates of NVIDIA compute capability 9.0 (CUDA C++ Programming Guide, arithmetic throughput): 128 fp32
additions or products per clock and SM, but 64 integer operations, comparisons, selections or conversions,
which therefore count as two; 16 results of ex2, lg2, rcp, sqrt, sin, cos and tanh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa4flex.codegen.analyze.facts import ASKED, SCORE, Facts
from fa4flex.codegen.analyze.hoist import hoist, read_by_pairs
from fa4flex.codegen.expr import Expr, apply, sym, walk
from fa4flex.codegen.ops import OPS, Cost
from fa4flex.kernels.plan.problem import Problem, itemsize

SOFTMAX = Cost(special=1, fp32=5)
"""Per score: exp2 of one FMA (1), the row's maximum (2) and sum (1), and half a packed conversion (1)."""

_SEARCH_STEPS = 12  # a binary search of a few thousand elements


@dataclass(frozen=True)
class Bias:
    """A captured tensor with an element per (q, kv) pair: bytes of one, and whether b and h select it too."""

    itemsize: int
    batch: bool
    heads: bool


@dataclass(frozen=True)
class Work:
    """Per score of a full tile: `special` function results, `fp32` slots and `loads`, softmax included.

    uniform, row, column, element   how many values the hooks keep or compute at each rate
    row_ends                        ends of key spans that differ from row to row
    bias                            tensors that are streamed with the scores
    """

    special: float = SOFTMAX.special
    fp32: float = SOFTMAX.fp32
    loads: float = 0
    uniform: int = 0
    row: int = 0
    column: int = 0
    element: int = 0
    row_ends: int = 0
    bias: tuple[Bias, ...] = ()

    def explain(self) -> str:
        return (
            f"per score {self.special:g} special functions, {self.fp32:g} fp32 slots, {self.loads:g} loads;"
            f" values kept: {self.uniform} per head, {self.row} per row, {self.column} per key"
        )


DROPOUT = 4
"""Slots of a score's share of its hash and of its selection: docs/notes/dropout.md."""


def count_work(facts: Facts, problem: Problem) -> Work:
    """Facts -> Work. Masks are left out of the cost: full tiles never evaluate them."""
    # Beside ends of rows, the mask's terms are computed where it is asked, and not kept.
    asked = problem.mask_form in ASKED and not problem.row_ends
    hooked = (facts.score, facts.mask) if asked else (facts.score,)
    terms = hoist(*hooked)
    cost = SOFTMAX.plus(score_cost(facts.score)).plus(Cost(0, DROPOUT if problem.dropout else 0))
    ends = len(_row_ends(facts)) if problem.mask_form == "spans" else 2 * problem.row_ends
    return Work(
        *cost,
        uniform=len(terms.uniform) + 4 * problem.dropout,
        row=len(terms.row) + problem.dropout,
        column=len(terms.column),
        element=terms.element_operations,
        row_ends=ends,
        bias=tuple(_biases(facts.score, problem)),
    )


def score_cost(score: Expr) -> Cost:
    """Cost of the modified score, per score, beyond the softmax; terms of the row or head are free."""
    total = Cost()
    nodes = _evaluated(score)
    extents = {node.value[1]: node.value[2] for node in nodes if node.op == "reduce"}
    varies: dict[Expr, frozenset[str]] = {}
    for node in nodes:
        varies[node] = _varies_with(node, varies)
        repeats = math.prod(extents[axis] for axis in node.free if axis in extents)
        total = total.plus(node_cost(node).times(_share(varies[node]) * repeats))
    return total


_OFFSETS = tuple(apply("sub", a, b) for a, b in ((sym("q"), sym("kv")), (sym("kv"), sym("q"))))


def _varies_with(node: Expr, known: dict[Expr, frozenset[str]]) -> frozenset[str]:
    """Symbols that the value changes with: some of the score, the row, the key and their offset."""
    if node in _OFFSETS:
        return frozenset({"offset"})
    if node.op == "sym":
        return node.free & {"score", "q", "kv"}
    return frozenset().union(*(known.get(argument, frozenset()) for argument in node.args))


def _share(varies: frozenset[str]) -> float:
    """Number of times a value is computed, per score. A thread's rows r and r + 8 share each column, and of 8
    columns the offsets in one row are those of the next 8 in the other: half either way."""
    if "score" in varies or len(varies) > 1:
        return 1.0
    return 0.5 if varies & {"kv", "offset"} else 0.0


def node_cost(node: Expr) -> Cost:
    """Cost of evaluating this node once, its arguments aside."""
    if not node.args:
        return Cost()
    if node.op == "load":
        return Cost(0, 2 * len(node.args), 1)
    if node.op == "search":
        return Cost(0, 4 * _SEARCH_STEPS, _SEARCH_STEPS)
    if node.op == "reduce":
        return Cost(0, node.value[2])
    if node.op == "round_to":
        return Cost(0, 4)
    if node.op == "div" and node.args[1].op == "const":
        return OPS["mul"].cost
    if node.op in ("floordiv", "mod") and _power_of_two(node.args[1]):
        return OPS["shr"].cost
    doubled = node.kind == "int" and node.op in ("add", "sub", "mul")
    return OPS[node.op].cost.times(2 if doubled else 1)


def _power_of_two(x: Expr) -> bool:
    return x.op == "const" and x.kind == "int" and x.value > 0 and not x.value & (x.value - 1)


def _evaluated(root: Expr) -> list[Expr]:
    """Nodes that a forward pass computes, arguments first; of `with_grad` the value alone."""
    reached: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.args[:1] if node.op == "with_grad" else node.args)
    return [node for node in walk(root) if node in reached]


def _row_ends(facts: Facts) -> tuple[Expr, ...]:
    assert facts.keys is not None
    return tuple({end: None for span in facts.keys.spans for end in span if "q" in end.free})


def _biases(score: Expr, problem: Problem) -> list[Bias]:
    """Loads of as many elements as scores."""
    results = []
    for node in _evaluated(score):
        if read_by_pairs(node):
            dtype, _ = problem.operands[node.value]
            results.append(Bias(itemsize(dtype), "b" in node.free, "h" in node.free))
    return results


def is_plain(facts: Facts, problem: Problem) -> bool:
    """True if a score is used as it is, and no mask is evaluated pair by pair."""
    plain = facts.score is SCORE and problem.weights == "softmax"
    return plain and problem.mask_form not in ASKED
