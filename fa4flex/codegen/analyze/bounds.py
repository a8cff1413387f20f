"""Interval arithmetic on expressions: the range of every value over many boxes of indices at once.

A box gives each symbol an interval. The range of an expression over a box contains each value that the
expression takes at a point of the box (Moore, Interval Analysis, 1966). For a mask, that is a proof: a box
whose range is {False} is empty, one whose range is {True} is full. Sums are bounded in linear form, so
they are exact when their atoms are independent.

Ends are Python numbers, or tensors that broadcast over the boxes. With Python ends, integers are exact at
any size; with tensors they are int64, and the caller passes the nodes that could leave int64 as `known`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fa4flex.codegen.analyze.linear import Linear, linear
from fa4flex.codegen.analyze.rules import SIGN_TESTS, Bounds, Value, real, rounded, rule_for
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.expr import Expr, walk
from fa4flex.codegen.ops import COMPARISONS, FOLDS

__all__ = ["Bounds", "bounds"]

_SUMS = frozenset(("add", "sub", "neg", "mul", "shl", "bitnot"))
_WORD = 1 << 63


def bounds(
    roots: Sequence[Expr],
    symbols: Mapping[str, Bounds],
    tables: Tables,
    known: Mapping[Expr, Bounds] | None = None,
) -> list[Bounds]:
    """The range of each root where each symbol lies in its interval; `known` ranges are taken as given."""
    memo = dict(known or {})
    _fill(tuple(roots), memo, symbols, tables)
    return [memo[root] for root in roots]


# --- which nodes are needed, in which order -------------------------------------------------------------


def _difference(node: Expr) -> Linear | None:
    """The sum an integer node or comparison is bounded through, if it is."""
    if node.op in COMPARISONS and node.args[0].kind == "int":
        return linear(node.args[0]) - linear(node.args[1])
    if node.op in _SUMS and node.kind == "int":
        form = linear(node)
        return None if form.terms == ((node, 1),) else form
    return None


@lru_cache(maxsize=512)
def _program(roots: tuple[Expr, ...]) -> tuple[tuple[Expr, Linear | None], ...]:
    """Nodes to bound, arguments first: sums need their atoms only, and loops bring their own bodies."""
    forms: dict[Expr, Linear | None] = {}

    def needed(node: Expr) -> Sequence[Expr]:
        form = forms[node] = _difference(node)
        return [atom for atom, _ in form.terms] if form else () if node.op == "reduce" else node.args

    return tuple([(node, forms[node]) for node in walk(*roots, into=needed)])


def _fill(
    roots: tuple[Expr, ...], memo: dict[Expr, Bounds], symbols: Mapping[str, Bounds], tables: Tables
) -> None:
    for node, form in _program(roots):
        if node in memo:
            continue
        if form is not None:
            total = _sum(form, memo)
            memo[node] = SIGN_TESTS[node.op](total) if node.op in COMPARISONS else total
        elif node.op == "reduce":
            memo[node] = _reduce(node, memo, symbols, tables)
        else:
            memo[node] = _leaf_or_rule(node, memo, symbols, tables)


def _leaf_or_rule(
    node: Expr, memo: Mapping[Expr, Bounds], symbols: Mapping[str, Bounds], tables: Tables
) -> Bounds:
    args = [memo[a] for a in node.args]
    match node.op:
        case "sym":
            return symbols[node.value]
        case "const" | "scalar":
            value = node.value if node.op == "const" else tables.captured.scalars[node.value]
            return rounded(real(value), real(value)) if node.kind == "float" else Bounds(value, value)
        case "load":
            return _from_table(node, tables.range(node.value, [(a.lo, a.hi) for a in args]))
        case "search":
            slot, side = node.value
            return Bounds(
                *tables.search(slot, side, (args[0].lo, args[0].hi), [(a.lo, a.hi) for a in args[1:]])
            )
        case "round_to":
            narrow = getattr(torch, node.value)
            lo, hi = (x.to(narrow).double() for x in (args[0].lo, args[0].hi))
            return Bounds(lo, hi, args[0].nan)
    return rule_for(node.op, node.args[-1].kind)(*args)


def _from_table(node: Expr, results: tuple[Value, Value, bool]) -> Bounds:
    lo, hi, nan = results
    if node.kind == "float":
        return rounded(real(lo), real(hi), nan)
    return Bounds(lo, hi)


def _reduce(node: Expr, memo: Mapping[Expr, Bounds], symbols: Mapping[str, Bounds], tables: Tables) -> Bounds:
    """Fold over the axis, one exact index after another; what is free of the axis is bounded once."""
    how, axis, extent = node.value
    body = node.args[0]
    fold = rule_for(FOLDS[how], body.kind)
    shared = dict(memo)
    total: Bounds | None = None
    for i in range(extent):
        inner = dict(shared)
        _fill((body,), inner, {**symbols, axis: Bounds(i, i)}, tables)
        if i == 0:
            shared.update((n, value) for n, value in inner.items() if axis not in n.free)
        total = inner[body] if total is None else fold(total, inner[body])
    assert total is not None, "empty reductions are folded when the expression is built"
    return total


def _sum(form: Linear, memo: Mapping[Expr, Bounds]) -> Bounds:
    lo, hi = [form.constant], [form.constant]
    for atom, c in form.terms:
        low, high = (memo[atom].lo, memo[atom].hi) if c > 0 else (memo[atom].hi, memo[atom].lo)
        lo.append(_times(low, c))
        hi.append(_times(high, c))
    points = all(memo[atom].lo is memo[atom].hi for atom, _ in form.terms)
    total = _total(lo)
    return Bounds(total, total if points else _total(hi))


def _total(parts: list[Value]) -> Value:
    """Partial sums of tensors may wrap in int64; the total does not, or its node would be in `known`."""
    number: Value = sum(x for x in parts if not isinstance(x, Tensor))
    tensors = [x for x in parts if isinstance(x, Tensor)]
    if not tensors:
        return number
    total: Value = (number + _WORD) % (2 * _WORD) - _WORD
    for x in tensors:
        total = x + total
    return total


def _times(x: Value, c: int) -> Value:
    return x if c == 1 else -x if c == -1 else x * c
