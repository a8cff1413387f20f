"""Elementwise weights and their slopes, of backward passes, in fewer instructions.

Both are computed beside products, for each score, and what they have in common once. What is derived by rules
is longer than it must be: selections between branches of which one is 0 anyway, ties of a maximum with 0,
products that are the weight times something. Values are those of the expressions for finite scores, but for
rounding; of a score that is no number, a clamp is 0 here, while the forward pass shows it.
"""

from __future__ import annotations

from collections import Counter
from functools import reduce

from fa4flex.codegen.emit.nodes import SCORE, device
from fa4flex.codegen.expr import Expr, apply, const, rebuild, rewritten, walk

_ZERO, _ONE, _HALF = const(0.0), const(1.0), const(0.5)
_STEEP = const(2.0**120)
"""Slope of a line that is at an end of [0, 1] one float32 beside its middle, which is about no less than
2^-90."""
_LEAST, _MOST = 2.0**-40, 2.0**40
"""Limits of clamps that are multiples of one at 1: of more, small scores would be lost."""
_BOUNDED = frozenset(("sigmoid", "tanh", "erf", "sin", "cos"))


def shortened(weight: Expr, slope: Expr) -> tuple[Expr, Expr]:
    """A weight as a function of the scaled score, and its derivative, both rewritten for devices: besides
    operations of mods they have `saturated` and `shared` ones (emit/lower.py)."""
    weight, slope = _plain(weight), _plain(slope)
    slope = _by_weight(slope, weight)
    memo: dict[Expr, Expr] = {}
    return rewritten(weight, _clamped, memo), rewritten(slope, _clamped, memo)


# --- selections that select nothing -----------------------------------------------------------------------


def _plain(x: Expr) -> Expr:
    return rewritten(x, lambda node, args: _selected(rebuild(node, args)))


def _selected(x: Expr) -> Expr:
    """A node without a selection between it and a 0 that it is anyway."""
    if x.op == "where":
        condition, yes, no = x.args
        if condition.op == "le" and condition.args[1] is _ZERO and yes is _ZERO and no is condition.args[0]:
            return apply("maximum", no, _ZERO)
        for kept, other, chosen in ((yes, no, True), (no, yes, False)):
            low = _not_above_zero(condition, not chosen)
            if other is _ZERO and low is not None and _vanishes(kept, low):
                return kept
        return _cut(condition, yes) if no is _ZERO else x
    if x.op == "mul":
        for tie, other in (x.args, x.args[::-1]):
            if tie.op == "where" and tie.args[0].op == "eq" and tie.args[2] is _ONE:
                low = _not_above_zero(tie.args[0], True)
                if tie.args[1].op == "const" and low is not None and _vanishes(other, low):
                    return other
    if x.op == "add" and x.args[0] is x.args[1]:
        return apply("mul", const(2.0), x.args[0])
    return x


def _not_above_zero(condition: Expr, truth: bool) -> Expr | None:
    """A number that is at most 0, or none at all, where the condition is `truth`."""
    if condition.op == "eq":
        a, b = condition.args
        return (a if b is _ZERO else b if a is _ZERO else None) if truth else None
    if condition.op in ("lt", "le"):
        a, b = condition.args
        return (a if b is _ZERO else None) if truth else (b if a is _ZERO else None)
    return None


def _vanishes(x: Expr, low: Expr) -> bool:
    """True if x is 0 wherever `low` is at most 0."""
    match x.op:
        case "maximum":
            return {*x.args} == {low, _ZERO}
        case "minimum":
            limits = [a for a in x.args if a.op == "const" and a.value >= 0]
            return any(_vanishes(a, low) for a in x.args if limits and a is not limits[0])
        case "mul":
            a, b = x.args
            return (_vanishes(a, low) and _bounded(b)) or (_vanishes(b, low) and _bounded(a))
        case "div":
            return _vanishes(x.args[0], low) and "score" not in x.args[1].free
        case "add":
            return all(_vanishes(a, low) for a in x.args)
    return False


def _bounded(x: Expr) -> bool:
    """True if x, which may be multiplied by 0, is surely finite, if what a mod captures is."""
    if "score" not in x.free or x.op in _BOUNDED:
        return True
    match x.op:
        case "minimum":
            return any(a.op == "const" and _above(b, a) for a, b in (x.args, x.args[::-1]))
        case "where":
            return _bounded(x.args[1]) and _bounded(x.args[2])
        case "mul" | "add" | "sub" | "neg":
            return all(map(_bounded, x.args))
    return False


def _above(x: Expr, limit: Expr) -> bool:
    """True if x is at least some constant, where another one is its upper limit."""
    return x.op == "maximum" and any(a.op == "const" for a in x.args) and limit.op == "const"


def _cut(condition: Expr, x: Expr) -> Expr:
    """x up to a limit, half of it at the limit and nothing beyond, as a product with a steep line: two
    multiply-adds where comparisons and selections take four instructions of half the rate."""
    whole = apply("where", condition, x, _ZERO)
    if condition.op != "le" or x.op != "mul":
        return whole
    value, limit = condition.args
    for tie, rest in (x.args, x.args[::-1]):
        tied = (apply("eq", value, limit), _HALF, _ONE)
        alike = tie.op == "where" and tie.args == tied
        if alike and limit.op == "const" and _LEAST <= limit.value <= _MOST and _bounded(rest):
            below = apply("sub", limit, _without_floor(value))
            return apply("mul", rest, device("saturated", below, _STEEP, _HALF))
    return whole


def _without_floor(x: Expr) -> Expr:
    """x, of which only matters on which side of a positive number it is."""
    if x.op == "maximum" and _ZERO in x.args:
        return x.args[0] if x.args[1] is _ZERO else x.args[1]
    return x


# --- products that are the weight times something ---------------------------------------------------------


def _by_weight(slope: Expr, weight: Expr) -> Expr:
    """A slope whose terms that have all factors of the weight are the weight times the others."""
    wanted, number = _factors(weight)
    if sum("score" in factor.free for factor in wanted.elements()) < 2:
        return slope
    terms = [_term_by_weight(term, weight, wanted, number) for term in _terms(slope)]
    return reduce(lambda a, b: apply("add", a, b), terms)


def _terms(x: Expr) -> list[Expr]:
    return [term for arg in x.args for term in _terms(arg)] if x.op == "add" else [x]


def _term_by_weight(term: Expr, weight: Expr, wanted: Counter[Expr], number: float) -> Expr:
    found, own = _factors(term)
    rest = found.copy()
    rest.subtract(wanted)
    if min(rest.values(), default=0) < 0 or not number:
        return term
    others = reduce(lambda a, b: apply("mul", a, b), rest.elements(), const(own / number))
    return apply("mul", device("shared", weight), others)


def _factors(x: Expr) -> tuple[Counter[Expr], float]:
    """Factors of a product and its constant; of a divisor, its reciprocal is the factor."""
    match x.op:
        case "const":
            return Counter(), x.value
        case "mul":
            (a, m), (b, n) = map(_factors, x.args)
            return a + b, m * n
        case "div" if x.args[0] is not _ONE:
            (a, m), (b, n) = _factors(x.args[0]), _factors(apply("div", _ONE, x.args[1]))
            return a + b, m * n
    return Counter([x]), 1.0


# --- clamps and parabolas ---------------------------------------------------------------------------------


def _clamped(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """Clamps to [0, c] as one multiply-add that saturates, and one product; x (1 - x) as x - x^2."""
    x = device(node.op, *args, value=node.value, kind=node.kind) if args else node
    if x.op == "minimum":
        for limit, inner in (x.args, x.args[::-1]):
            if limit.op == "const" and _LEAST <= limit.value <= _MOST and inner.op == "maximum":
                lowest = [a for a in inner.args if a is not _ZERO]
                if len(lowest) == 1 and SCORE in walk(lowest[0]):
                    whole = device("saturated", lowest[0], const(1.0 / limit.value), _ZERO)
                    return device("shared", apply("mul", whole, limit))
    if x.op == "mul":
        for y, other in (x.args, x.args[::-1]):
            if other.op == "sub" and other.args[0] is _ONE and other.args[1] is y:
                return apply("sub", y, apply("mul", y, y))
    return x
