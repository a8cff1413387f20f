"""Weights with a logistic function that kernels compute for groups of scores (kernels/common/logistic.py).

Whatever way it is written, 1 / (1 + exp(-x)) is one operation here, and what a quotient has above it is a
product with it. A weight in which it is met once is computed by groups; its argument has the units, and a
product with it the factor, that cost nothing there.
"""

from __future__ import annotations

import math

from fa4flex.codegen.emit.lower import Lowering
from fa4flex.codegen.emit.nodes import LOG2_E, ONE, axes, device, keeps
from fa4flex.codegen.emit.terms import UNIT, Factor, scaled, single, total
from fa4flex.codegen.expr import Expr, apply, const, rebuild, rewritten, walk

_HALF = Factor(0.5)


def by_groups(weight: Expr, lowering: Lowering, dtype: str) -> Expr | None:
    """The lowered weight, None where groups of scores change nothing.

    A sum with something else, such as a bias, is taken to lie far below 0, or is computed as any: `SMALL`.
    A multiple of one term is taken to lie around 0, `EVEN`, where the error that this has is below what
    rounding to `dtype` costs.
    """
    weight = rewritten(weight, _as_logistic)
    found = [x for x in walk(weight) if x.op == "sigmoid" and "score" in x.free]
    folds = [x for x in walk(weight) if x.op == "reduce"]
    if len(found) != 1 or axes(found[0]) or any(found[0] in walk(x) for x in folds):
        return None
    if keeps(lowering.anew().value(weight)):  # what pairs keep takes the registers that a group needs
        return None
    terms = lowering.terms(found[0].args[0])
    if len(terms) > 1:
        lowering.define(found[0], ((UNIT, _logistic("SMALL", total(scaled(terms, Factor(LOG2_E))))),))
        return lowering.value(weight)
    if dtype != "bfloat16":
        return None
    half = total(scaled(terms, _HALF))
    node = _logistic("EVEN", half, const(0.5))
    lowering.define(found[0], ((UNIT, node),))
    one = single(lowering.terms(weight))
    beside = None if one is None else _beside(node, one[1])
    if one is None or beside is None:
        return lowering.value(weight)
    return _logistic("EVEN", half, total(scaled(((one[0], beside),), _HALF)))


def way_of(root: Expr) -> str:
    """The object of kernels/common/logistic.py by which a weight's logistic function is computed, or ""."""
    return next((str(x.value) for x in walk(root) if x.op == "logistic"), "")


def _logistic(way: str, *arguments: Expr) -> Expr:
    return device("logistic", *arguments, value=way)


def _beside(node: Expr, product: Expr) -> Expr | None:
    """The factor beside a node in a product, None where the node has a part in it."""
    if product is node:
        return ONE
    if product.op != "mul" or node not in product.args:
        return None
    a, b = product.args
    other = b if a is node else a
    return None if node in walk(other) else other


def _as_logistic(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """a / (1 + exp(x)) is a times the logistic function of -x."""
    node = rebuild(node, args)
    exponent = _exponent(node.args[1]) if node.op == "div" else None
    if exponent is None:
        return node
    return apply("mul", node.args[0], apply("sigmoid", apply("neg", exponent)))


def _exponent(x: Expr) -> Expr | None:
    """e of 1 + exp(e)."""
    if x.op != "add" or const(1.0) not in x.args:
        return None
    power = x.args[1] if x.args[0] is const(1.0) else x.args[0]
    if power.op == "exp2":
        return apply("mul", power.args[0], const(math.log(2)))
    return power.args[0] if power.op == "exp" else None
