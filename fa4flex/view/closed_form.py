"""Key intervals for people: at given lengths and numbers, simplified by sympy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4flex.codegen.analyze.domain import Shape, bind
from fa4flex.codegen.analyze.intervals import KeyIntervals
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, walk
from fa4flex.codegen.ops import INFIX


def closed_form(
    keys: KeyIntervals, shape: Shape, captured: Captured, show: Callable[[Expr], str]
) -> list[str]:
    """Each interval of keys that query q attends, with lengths and captured numbers put in."""
    import sympy

    first, last = sympy.Integer(0), sympy.Integer(shape.kv_len)
    lines = []
    for lo, hi in keys.spans:
        low, high = (_symbolic(bind(end, shape, captured), shape, show) for end in (lo, hi))
        start, stop = sympy.Max(first, low), sympy.Min(last, high)
        if sympy.Min(start, stop) != stop:  # else it is empty whatever q is
            lines.append(f"keys {start} <= kv < {stop}")
    return lines


def _symbolic(root: Expr, shape: Shape, show: Callable[[Expr], str]) -> Any:
    """`root` in sympy's terms; what sympy has no counterpart for becomes a symbol with its text as name."""
    import sympy

    builders: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "neg": lambda a: -a,
        "minimum": sympy.Min,
        "maximum": sympy.Max,
    }
    memo: dict[Expr, Any] = {}
    for node in walk(root):
        if node.op == "const":
            memo[node] = sympy.Integer(node.value) if node.kind == "int" else sympy.Float(node.value)
        elif node.op in builders and node.kind == "int":
            memo[node] = builders[node.op](*(memo[a] for a in node.args))
        else:
            # Indices are nonnegative; knowing that lets sympy drop max(0, q).
            text = f"({show(node)})" if node.op in INFIX else show(node)
            memo[node] = sympy.Symbol(text, integer=True, nonnegative=node.op == "sym" or None)
    return memo[root]
