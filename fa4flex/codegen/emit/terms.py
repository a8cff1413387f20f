"""Floating sums: coefficient times atom, where coefficients change with the work tile at most.

Hooks run once per score, beside an exponential: what can be multiplied, added or converted once per row, key
or diagonal must not be left there. A sum is therefore flattened, common factors are moved into coefficients,
and the terms of each rate are added up before they meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from fa4flex.codegen.emit.nodes import ONE, RATES, SCORE, Rate, both, rate
from fa4flex.codegen.expr import Expr, apply, const


@dataclass(frozen=True)
class Factor:
    """constant * uniform: a number known now times one known once per work tile (None: 1)."""

    constant: float = 1.0
    uniform: Expr | None = None

    def __mul__(self, other: Factor) -> Factor:
        return Factor(self.constant * other.constant, both("mul", self.uniform, other.uniform))

    @property
    def is_one(self) -> bool:
        return self.uniform is None and self.is_unscaled

    @property
    def is_unscaled(self) -> bool:
        return abs(self.constant - 1.0) < 1e-12

    def expr(self) -> Expr:
        if self.uniform is None:
            return const(self.constant)
        if self.constant == -1.0:
            return apply("neg", self.uniform)
        return apply("mul", self.uniform, const(self.constant)) if self.constant != 1.0 else self.uniform


UNIT = Factor()
Term = tuple[Factor, Expr]
Terms = tuple[Term, ...]
Groups = dict[Rate, Expr]
Join = Callable[[Expr, Expr], Expr]


def scaled(terms: Terms, by: Factor) -> Terms:
    return tuple((factor * by, atom) for factor, atom in terms)


def merged(terms: Terms) -> Terms:
    """Terms with like ones added up."""
    total: dict[tuple[Expr | None, Expr], float] = {}
    for factor, atom in terms:
        key = (factor.uniform, atom)
        if factor.constant != 0.0 or factor.uniform is not None or atom is not ONE:  # + 0.0 adds nothing
            total[key] = total.get(key, 0.0) + factor.constant
    return tuple((Factor(c, uniform), atom) for (uniform, atom), c in total.items())


def single(terms: Terms) -> Term | None:
    """The one term of a sum that has one."""
    return terms[0] if len(terms) == 1 else None


def total(terms: Terms) -> Expr:
    """The sum as an expression: terms of one rate first, the score last, where a multiply-add takes it in."""
    groups: Groups = {}
    for factor, atom in sorted(merged(terms), key=_is_score):
        term = times(atom, factor)
        groups[rate(term)] = plus(groups[rate(term)], term) if rate(term) in groups else term
    return combined(groups, plus) if groups else const(0.0)


def _is_score(term: Term) -> bool:
    return term[1] is SCORE


def combined(groups: Groups, join: Join) -> Expr:
    """Parts of different rates as one: the uniform one joins the next cheapest, which saves an operation."""
    order = [level for level in RATES if level in groups]
    if order[0] == "uniform" and len(order) > 1 and order[1] != "element":
        groups = groups | {order[1]: join(groups[order[1]], groups["uniform"])}
        order = order[1:]
    rest = (
        reduce(join, (groups[level] for level in order if level != "element"))
        if order != ["element"]
        else None
    )
    if "element" not in groups:
        assert rest is not None
        return rest
    return groups["element"] if rest is None else _into(groups["element"], rest, join)


def _into(element: Expr, rest: Expr, join: Join) -> Expr:
    """`rest` is added to the first product of an element-rate sum, so that it costs nothing."""
    if element.op in ("add", "sub") and rate(element.args[0]) == "element":
        return apply(element.op, _into(element.args[0], rest, join), element.args[1])
    return join(element, rest)


def plus(a: Expr, b: Expr) -> Expr:
    """a + b, without additions of what is negative."""
    if b.op == "neg":
        return apply("sub", a, b.args[0])
    if a.op == "neg":
        return apply("sub", b, a.args[0])
    if b.op == "const" and b.value < 0:
        return apply("sub", a, const(-b.value))
    return apply("add", a, b)


# --- multiplying ----------------------------------------------------------------------------------------


def times(x: Expr, by: Factor) -> Expr:
    """x * by, multiplied where it is cheapest: into a constant, a coefficient, the branches of a choice."""
    if by.is_one:
        return x
    if x is ONE:
        return by.expr()
    if x.op == "const" and by.uniform is None:
        return const(x.value * by.constant)
    if rate(x) != "uniform" and _cost(x, rate(x)) <= 1:
        if x.op == "where":
            return apply("where", x.args[0], times(x.args[1], by), times(x.args[2], by))
        if x.op == "mul":
            slow, fast = sorted(x.args, key=lambda a: RATES.index(rate(a)))
            if rate(slow) != rate(x):
                return apply("mul", fast, times(slow, by))
        if x.op in ("add", "sub"):
            return apply(x.op, times(x.args[0], by), times(x.args[1], by))
    if by.uniform is None and by.constant == -1.0:
        return apply("neg", x)
    return apply("mul", x, by.expr())


def _cost(x: Expr, level: Rate) -> int:
    """Operations at a rate that multiplying inside x takes; multiplying outside takes 1."""
    if rate(x) != level:
        return 0
    if x.op == "where":
        return _cost(x.args[1], level) + _cost(x.args[2], level)
    if x.op == "mul" and any(rate(a) != level for a in x.args):
        return 0
    if x.op in ("add", "sub"):
        return _cost(x.args[0], level) + _cost(x.args[1], level)
    return 1


def free_to_scale(x: Expr) -> bool:
    """True if a factor disappears into what x is computed from."""
    return _cost(x, rate(x)) == 0
