"""The most keys that a row of queries sees, from the ends of its key intervals: a window has few of many."""

from __future__ import annotations

from itertools import product

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, apply


def keys_seen(facts: Facts, shape: Shape, captured: Captured) -> int | None:
    """Upper bound of the keys of any row of a problem, with these captured numbers; None where a mask is no
    union of key intervals. It may be more than there are keys."""
    if facts.keys is None:
        return None
    tables, symbols = Tables(captured.unread().signed()), shape.ranges()
    total = 0
    for lo, hi in facts.keys.spans:
        # An end that is the greatest of several is bounded by each of them: with one of these, what both ends
        # have in common cancels.
        lengths = [apply("sub", b, a) for a, b in product(_parts("maximum", lo), _parts("minimum", hi))]
        total += max(int(min(result.hi for result in bounds(lengths, symbols, tables))), 0)
    return total


def _parts(op: str, end: Expr) -> list[Expr]:
    """An end, and if it is an extreme of several, these."""
    return [end, *(part for arg in end.args for part in _parts(op, arg))] if end.op == op else [end]
