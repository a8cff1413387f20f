"""Expressions to do arithmetic with: what formulas and slopes of ops.py, and ranges, are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4flex.codegen.expr import Expr, apply, const
from fa4flex.codegen.ops import OPS


def _binary(op: str) -> Callable[[Any, Any], Formula]:
    return lambda a, b: formula(op, a, b)


def _reflected(op: str) -> Callable[[Any, Any], Formula]:
    return lambda a, b: formula(op, b, a)


class Formula:
    """An expression with Python's operators, and each operation of the grammar as a method."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __getattr__(self, op: str) -> Callable[..., Formula]:
        if op not in OPS:
            raise AttributeError(op)
        return lambda *others: formula(op, self, *others)

    def __neg__(self) -> Formula:
        return formula("neg", self)

    def __invert__(self) -> Formula:
        return formula("not_", self)

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __floordiv__ = _binary("floordiv")
    __and__, __or__, __xor__ = _binary("and_"), _binary("or_"), _binary("xor")
    __lt__, __le__ = _binary("lt"), _binary("le")
    __eq__ = _binary("eq")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def formula(op: str, *args: Formula | float) -> Formula:
    """The operation on expressions and numbers."""
    return Formula(apply(op, *map(expr_of, args)))


def expr_of(x: Formula | float) -> Expr:
    return x.expr if isinstance(x, Formula) else const(x)
