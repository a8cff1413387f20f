"""Units of a score hook's result: y and a factor; a probability is proportional to exp2(factor * y).

What is added to the scaled score needs no hook after the product: the accumulation starts from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.codegen.emit.lower import Lowering
from fa4flex.codegen.emit.nodes import LOG2_E, SCALE, SCORE, device, rate
from fa4flex.codegen.emit.terms import Factor, Terms, free_to_scale, scaled, single, times, total
from fa4flex.codegen.expr import Expr, apply, const
from fa4flex.codegen.ops import OPS

_TINY = const(1e-30)


@dataclass(frozen=True)
class Scaled:
    """y, or None for the accumulated score itself; factor, or None for scale * log2(e); start, what the
    score is accumulated upon, or None for 0."""

    y: Expr | None
    factor: Expr | None
    start: Expr | None = None


def in_units(score: Expr, lowering: Lowering, positive_scale: bool, ordered: bool = True) -> Scaled:
    """The modified score, with as much as possible of what multiplies it left to the softmax.

    The softmax multiplies by the factor when it subtracts the maximum, where it costs nothing. Only a
    positive number may go there where the maximum is taken before: where y must be `ordered` as scores are.
    """
    terms = lowering.terms(score)
    one = single(terms)
    if one is not None:
        factor, atom = one
        if atom is SCORE:
            return _of_the_score(factor, terms, positive_scale)
        if not ordered and rate(atom) == "element":
            return Scaled(atom, times(const(LOG2_E), factor))
        if rate(atom) == "element" and not free_to_scale(atom):
            if factor.uniform is None and factor.constant > 0:
                return Scaled(atom, const(factor.constant * LOG2_E))
            if atom.op in OPS and OPS[atom.op].odd and free_to_scale(atom.args[0]):
                return _odd(factor, atom)
    return _started(terms, positive_scale) or _in_log2(terms)


def _started(terms: Terms, positive_scale: bool) -> Scaled | None:
    """A multiple of the score plus what needs no score: (score + rest / multiple) * multiple."""
    scores = [factor for factor, atom in terms if atom is SCORE]
    rest = tuple(term for term in terms if term[1] is not SCORE)
    if len(scores) != 1 or any("score" in atom.free for _, atom in rest):
        return None
    plain = _of_the_score(scores[0], terms, positive_scale)
    if plain.y is not None:
        return None
    inverse = Factor(1.0 / scores[0].constant, device("reciprocal", SCALE))
    return Scaled(None, plain.factor, total(scaled(rest, inverse)))


def _in_log2(terms: Terms) -> Scaled:
    return Scaled(total(scaled(terms, Factor(LOG2_E))), const(1.0))


def _of_the_score(factor: Factor, terms: Terms, positive_scale: bool) -> Scaled:
    """A multiple of the score."""
    if not positive_scale or factor.uniform is not SCALE or factor.constant <= 0:
        return _in_log2(terms)
    if factor.is_unscaled:
        return Scaled(None, None)
    return Scaled(None, apply("mul", SCALE, const(factor.constant * LOG2_E)))


def _odd(factor: Factor, atom: Expr) -> Scaled:
    """c * f(x) = |c| * f(sign(c) * x), and a sign inside f joins the coefficients of x."""
    if factor.uniform is None:
        sign, size = Factor(-1.0), const(-factor.constant * LOG2_E)
    else:
        sign = Factor(1.0 if factor.constant > 0 else -1.0, device("signum", factor.uniform))
        size = apply("mul", apply("abs", factor.uniform), const(abs(factor.constant) * LOG2_E))
        size = apply("maximum", size, _TINY)  # a factor of 0 would turn a masked -inf into NaN
    return Scaled(apply(atom.op, times(atom.args[0], sign)), size)
