"""Vectors inside reductions: what a loop over an axis reads once per row or key, read there.

A dot product of a query's vector with a key's loads each vector once, not once per score.
"""

from __future__ import annotations

from fa4flex.codegen.emit.nodes import COLLECT, RATES, axes, device, is_leaf, rate, repeats
from fa4flex.codegen.expr import Expr, rewritten, sym
from fa4flex.errors import Origin


def with_vectors(root: Expr, came: dict[Expr, Origin | None]) -> Expr:
    """`root` with the slower parts of its loops collected before them, from the same lines (`came`)."""

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op == "reduce" and not repeats(node):  # what is written out may stay in registers
            args = (_collected(args[0], node, came),)
        made = device(node.op, *args, value=node.value, kind=node.kind)
        came.setdefault(made, came.get(node))
        return made

    return rewritten(root, change)


def _collected(body: Expr, loop: Expr, came: dict[Expr, Origin | None]) -> Expr:
    _, axis, extent = loop.value
    memo: dict[Expr, Expr] = {}

    def rewrite(x: Expr) -> Expr:
        if axis not in x.free or is_leaf(x):
            return x
        if x not in memo:
            slower = RATES.index(rate(x)) < RATES.index(rate(loop))
            if slower and axes(x) == {axis}:
                whole = device("reduce", x, value=(COLLECT, axis, extent), kind=x.kind)
                came.setdefault(whole, came.get(x))
                memo[x] = device("element_of", whole, sym(axis), kind=x.kind)
            else:
                memo[x] = device(x.op, *map(rewrite, x.args), value=x.value, kind=x.kind)
            came.setdefault(memo[x], came.get(x))
        return memo[x]

    return rewrite(body)
