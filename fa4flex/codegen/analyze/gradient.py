"""Derivatives of a score expression: by the raw score, and by every captured floating tensor.

Reverse-mode differentiation on the expression graph (Griewank & Walther, "Evaluating Derivatives", ch. 3):
every node gets an adjoint expression d score' / d node, users before arguments. The results are expressions
of the same grammar, so they share subexpressions with the score itself and run wherever it runs.

A node inside a reduction has one adjoint per value of the reduction's axis; where it feeds a node that
does not vary along the axis, the adjoint is summed over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fa4flex.codegen.analyze.linear import linear
from fa4flex.codegen.expr import (
    READS,
    Expr,
    apply,
    const,
    loops,
    rebuild,
    reduce,
    substitute,
    sym,
    to_float,
    walk,
)
from fa4flex.codegen.formula import Formula, expr_of
from fa4flex.codegen.ops import OPS

Pattern = Literal["constant in q and kv", "constant in kv", "constant in q", "diagonal", "general"]


@dataclass(frozen=True)
class CapturedGradient:
    """One contribution to the gradient of `operand[slot]`.

    For every pair (q, kv), and for every value of `axes` (reduction axes, each with its extent), the
    element at `index` receives `value` times the gradient of the modified score. `pattern` says what
    `index` depends on; "diagonal" means that q and kv enter it only through q - kv.
    Such an index may be evaluated anywhere on its diagonal.
    """

    slot: int
    index: tuple[Expr, ...]
    value: Expr
    axes: tuple[tuple[str, int], ...]
    pattern: Pattern

    def points(self) -> Iterator[dict[str, int]]:
        """Every combination of values of `axes`."""
        for point in itertools.product(*(range(extent) for _, extent in self.axes)):
            yield {axis: value for (axis, _), value in zip(self.axes, point, strict=True)}


@dataclass(frozen=True)
class ScoreGradient:
    """`by_score` = d score' / d score; `captured` = one entry per place where a floating tensor is read."""

    by_score: Expr
    captured: tuple[CapturedGradient, ...]

    def of_slots(self, slots: Iterable[int]) -> tuple[CapturedGradient, ...]:
        """The contributions to the gradients of the given operand slots."""
        wanted = frozenset(slots)
        return tuple(term for term in self.captured if term.slot in wanted)


ZERO, ONE = const(0.0), const(1.0)


# --- algebra that keeps unselected branches out --------------------------------------------------------


def _guard(condition: Expr, value: Expr) -> Expr:
    return apply("where", condition, value, ZERO)


def _times(a: Expr, b: Expr) -> Expr:
    """a * b, with a selection by `where(c, x, 0)` kept outermost.

    0 * inf is NaN: were the product taken after the selection, the infinite slope of a branch that was
    not selected would poison the gradient.
    """
    for guarded, other in ((a, b), (b, a)):
        if guarded.op == "where":
            condition, yes, no = guarded.args
            if no is ZERO:
                return _guard(condition, _times(yes, other))
            if yes is ZERO:
                return apply("where", condition, ZERO, _times(no, other))
    if b.op == "const":
        a, b = b, a
    if a.op == "const" and b.op == "neg":
        return _times(const(-a.value), b.args[0])
    if a.op == "const" and b.op == "mul" and b.args[0].op == "const":
        return _times(const(a.value * b.args[0].value), b.args[1])
    return apply("mul", a, b)


def _plus(a: Expr, b: Expr) -> Expr:
    """a + b, with a selection by `where(c, x, 0)` kept outermost where both have one."""
    if a.op == b.op == "where" and a.args[0] is b.args[0]:
        condition, *ends = a.args
        return apply(
            "where", condition, *[_plus_or_other(x, y) for x, y in zip(ends, b.args[1:], strict=True)]
        )
    guards = [_selected_by(x) for x in (a, b)]
    if guards[0] is None or guards[1] is None:
        return apply("add", a, b)
    return _guard(apply("or_", *guards), apply("add", a, b))  # type: ignore[arg-type]


def _plus_or_other(a: Expr, b: Expr) -> Expr:
    return b if a is ZERO else a if b is ZERO else _plus(a, b)


def _selected_by(x: Expr) -> Expr | None:
    """The condition that x is 0 without, of a selection."""
    if x.op != "where":
        return None
    condition, yes, no = x.args
    return condition if no is ZERO else apply("not_", condition) if yes is ZERO else None


# --- one rule per operation: the partial derivative by each argument, None where it is zero -------------

Partials = tuple[Expr | None, ...]


def _power(node: Expr, a: Expr, b: Expr) -> Partials:
    """Derivatives of a ** b; that of a square by a is a product."""
    y, base, exponent = map(Formula, (node, a, b))
    flat = base.eq(0.0).and_(Formula(apply("ge", b, ZERO)))
    by_exponent = flat.where(0.0, y * base.log())
    if b.op == "const" and b.value == 2:
        return (2.0 * base).expr, by_exponent.expr
    slope = exponent * base.pow(exponent - 1.0)
    return exponent.eq(0.0).where(0.0, slope).expr, by_exponent.expr


def _reduction_partial(node: Expr) -> Expr:
    """d reduction / d body, for each value of the axis."""
    how, axis, extent = node.value
    body = node.args[0]
    if how == "sum":
        return ONE
    if how == "prod":
        # The product of the others, rather than node / body, which is 0 / 0 where a factor is zero.
        other = f"{axis}'"
        term = substitute(body, {sym(axis): sym(other)})
        rest = apply("where", apply("eq", sym(other), sym(axis)), ONE, term)
        return reduce("prod", other, extent, rest)
    wins = apply("eq", body, node)
    winners = reduce("sum", axis, extent, _guard(wins, ONE))
    return _guard(wins, apply("div", ONE, winners))


def _partials(node: Expr) -> Partials:
    if node.op == "reduce":
        return (_reduction_partial(node),)
    if node.op == "round_to":
        return (ONE,)
    if node.op == "pow":
        return _power(node, *node.args)
    slopes = OPS[node.op].slopes
    assert slopes is not None, f"no derivative of {node.op}"
    return tuple(None if x is None else expr_of(x) for x in slopes(*map(Formula, (node, *node.args))))


# --- the reverse pass -----------------------------------------------------------------------------------


def _with_own_axes(x: Expr, owned: frozenset[Expr] = frozenset(), taken: Iterable[str] = ()) -> Expr:
    """`x` with every reduction over an axis of its own name, so that a name stands for one loop.

    Adjoints put a loop around terms that contain the same loop, closed: unless their names differ, a node
    under both has two values. Reductions in `owned` stay the nodes they are where that is safe, so that
    their work is shared; names in `taken` are not given again.
    """
    used = set(taken) | x.free
    memo: dict[tuple[Expr, tuple[tuple[str, str], ...]], Expr] = {}

    def visit(node: Expr, names: dict[str, str]) -> Expr:
        renamed = tuple(sorted((axis, names[axis]) for axis in node.free & names.keys()))
        if (node, renamed) not in memo:
            memo[node, renamed] = rename(node, dict(renamed))
        return memo[node, renamed]

    def rename(node: Expr, names: dict[str, str]) -> Expr:
        if node.op == "sym":
            return sym(names.get(node.value, node.value))
        if node.op != "reduce":
            return rebuild(node, tuple(visit(a, names) for a in node.args))
        if node in owned and not names and not loops(node).keys() & x.free:
            return node
        how, axis, extent = node.value
        candidates = itertools.chain([axis], (f"{axis}.{i}" for i in itertools.count(1)))
        name = next(n for n in candidates if n not in used)
        used.add(name)
        return reduce(how, name, extent, visit(node.args[0], {**names, axis: name}))

    return visit(x, {})


def _varying(order: list[Expr]) -> set[Expr]:
    """The float nodes that the score or a captured floating tensor flows into."""
    results: set[Expr] = set()
    for node in order:
        source = (node.op == "sym" and node.value == "score") or node.op == "load"
        if node.kind == "float" and (source or any(a in results for a in node.args)):
            results.add(node)
    return results


def _sum_over(axes: Iterable[str], extents: dict[str, int], x: Expr) -> Expr:
    for axis in sorted(axes):
        x = (
            reduce("sum", axis, extents[axis], x)
            if axis in x.free
            else _times(const(float(extents[axis])), x)
        )
    return x


def _sum(a: Expr, b: Expr) -> Expr:
    return apply("add", a, b)


def score_gradient(score: Expr, again: bool = False) -> ScoreGradient:
    """Differentiate a score expression by sym("score") and by each floating load in it.

    again   whether derivatives are differentiated in turn: sums of what selections feed into one node then
    stay
            behind a selection, as its own slope may be infinite where neither is selected
    """
    plus = _plus if again else _sum
    root = _with_own_axes(to_float(score))
    order, extents = list(walk(root)), loops(root)
    varying, owned = _varying(order), frozenset(order)
    adjoint: dict[Expr, Expr] = {root: ONE}
    captured: list[CapturedGradient] = []
    for node in reversed(order):
        if node not in adjoint or node not in varying:
            continue
        if again and adjoint[node].op == "const" and not adjoint[node].value:
            continue  # what is selected has cancelled: 0 times an infinite slope would be NaN
        if node.op == "load":
            captured.append(_captured(node, _with_own_axes(adjoint[node], owned, extents), extents))
            continue
        around = node.free & extents.keys() | ({node.value[1]} if node.op == "reduce" else set())
        for argument, partial in zip(node.args, _partials(node) if node.args else (), strict=True):
            if partial is None or argument not in varying:
                continue
            term = _sum_over(around - argument.free, extents, _times(adjoint[node], partial))
            adjoint[argument] = plus(adjoint[argument], term) if argument in adjoint else term
    captured.reverse()
    by_score = _with_own_axes(adjoint.get(sym("score"), ZERO), owned, extents)
    return ScoreGradient(by_score, tuple(captured))


# --- how a captured gradient can be reduced ---------------------------------------------------------------


def _captured(load: Expr, value: Expr, extents: dict[str, int]) -> CapturedGradient:
    axes = tuple((axis, extents[axis]) for axis in sorted(load.free & extents.keys()))
    return CapturedGradient(load.value, load.args, value, axes, classify(load.args))


def classify(index: tuple[Expr, ...]) -> Pattern:
    """Dependence of an index tuple on q and kv, as far as reducing over them is concerned."""
    free: frozenset[str] = frozenset().union(*(i.free for i in index))
    moves = free & {"q", "kv"}
    if not moves:
        return "constant in q and kv"
    if moves == {"q"}:
        return "constant in kv"
    if moves == {"kv"}:
        return "constant in q"
    return "diagonal" if all(map(_by_difference, index)) else "general"


def plain_index(index: Sequence[Expr]) -> tuple[str, ...] | None:
    """Names of the symbols that an index consists of, each of them once, or None."""
    names = tuple([i.value for i in index if i.op == "sym" and i.value in ("b", "h", "q", "kv")])
    return names if len(names) == len(index) == len(set(names)) else None


def written_once(terms: Sequence[CapturedGradient], alone: Collection[str] = ()) -> bool:
    """True if no two pairs of a launch read the same element of a tensor, whose only contributions these are:
    q and kv stand in its index by themselves, and so do b and h, unless they are among `alone`, of which a
    launch has a single value."""
    if len(terms) != 1 or terms[0].axes:
        return False
    index = terms[0].index
    plain = [i.value for i in index if i.op == "sym"]
    moving = [i for i in index if i.free & {"q", "kv"}]
    return len(moving) == 2 and {"b", "h", "q", "kv"} - set(alone) <= set(plain)


def quotient(x: Expr, by: Expr) -> Expr | None:
    """Quotient of `x` by `by`, where `by` is one of its factors."""
    if x is by:
        return ONE
    if x.op == "mul":
        for one, other in (x.args, x.args[::-1]):
            rest = quotient(one, by)
            if rest is not None:
                return _times(rest, other)
    if x.op == "neg":
        rest = quotient(x.args[0], by)
        return None if rest is None else apply("neg", rest)
    return None


def _by_difference(x: Expr) -> bool:
    """True if q and kv enter `x` only through q - kv, and arithmetic alone."""
    if not x.free & {"q", "kv"}:
        return True
    if x.op in READS:
        return False
    coefficients = dict(linear(x).terms)
    across, along = coefficients.pop(sym("q"), 0), coefficients.pop(sym("kv"), 0)
    if x in coefficients:  # no sum
        return bool(x.args) and all(map(_by_difference, x.args))
    return across == -along and all(map(_by_difference, coefficients))
