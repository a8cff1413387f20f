"""Lipschitz constants of score mods, expressions in sym("score"): how far one may move a score.

Sums add up constants, a factor multiplies them by its largest size, and functions by their steepest slope. A
jump, as of a comparison of scores, has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.rules import ANY_INT, Bounds, real
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.expr import Expr, apply, const, sym, walk

SLOPES = {"neg": 1.0, "abs": 1.0, "tanh": 1.0, "sin": 1.0, "cos": 1.0, "erf": 2 / math.sqrt(math.pi)}
"""Steepest slope of functions of one argument."""

_SCORE = sym("score")
_WIDEST = 1 << 31
_INDICES = ("b", "h", "q", "kv", "q_len", "kv_len", "num_heads")
_ANY_FLOAT = Bounds(real(-math.inf), real(math.inf), True)


def lipschitz(score: Expr, tables: Tables) -> float | None:
    """Greatest |f(x) - f(y)| / |x - y| of a score mod f, at any indices; None where none is known.

    Numbers of `tables` are read, its tensors may hold anything.
    """
    known = {
        x: _ANY_FLOAT if x.kind == "float" else ANY_INT for x in walk(score) if x.op in ("load", "search")
    }
    symbols = {name: Bounds(0, _WIDEST) for name in _INDICES} | {"score": _ANY_FLOAT}
    order = list(walk(score))
    varying: set[Expr] = set()
    for node in order:
        if node is _SCORE or any(x in varying for x in node.args):
            varying.add(node)

    def largest(x: Expr) -> float:
        """Largest size of an expression without the score; infinity if nothing bounds it."""
        if not x.free <= symbols.keys():
            return math.inf
        (found,) = bounds([x], symbols, tables, known)
        lo, hi = float(found.lo), float(found.hi)
        return math.inf if bool(found.nan) or math.isnan(lo + hi) else max(abs(lo), abs(hi))

    slopes: dict[Expr, float | None] = {}
    for node in order:
        slopes[node] = _slope(node, slopes, varying, largest) if node in varying else 0.0
    found = slopes[score]
    return found if found is not None and math.isfinite(found) else None


def _slope(
    node: Expr, slopes: Mapping[Expr, float | None], varying: set[Expr], largest: Callable[[Expr], float]
) -> float | None:
    """Lipschitz constant of a node by those of its arguments."""
    if node is _SCORE:
        return 1.0
    of = [slopes[x] for x in node.args]
    if any(x is None for x in of) or node.kind != "float":
        return None
    each = [x for x in of if x is not None]
    if node.op in ("add", "sub"):
        return sum(each)
    if node.op in ("maximum", "minimum"):
        return max(each)
    if node.op in SLOPES:
        return SLOPES[node.op] * each[0]
    if node.op == "where" and node.args[0] not in varying:
        return max(each[1:])
    if node.op == "mul" and any(x not in varying for x in node.args):
        moving, still = (0, 1) if node.args[0] in varying else (1, 0)
        return each[moving] * largest(node.args[still])
    if node.op == "div" and node.args[1] not in varying:
        return each[0] * largest(apply("div", const(1.0), node.args[1]))
    return None
