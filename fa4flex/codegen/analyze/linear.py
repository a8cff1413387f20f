"""Integer expressions as sums: coefficient times atom, plus a constant.

`(q - kv) + kv` is `q` in this form, so neither interval arithmetic nor the search for key intervals loses
what cancels. An atom is any integer node that is not itself a sum: a symbol, a load, a floor division, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa4flex.codegen.expr import Expr, apply, const

COEFFICIENT_LIMIT = 1 << 61


@dataclass(frozen=True)
class Linear:
    """sum(coefficient * atom for atom, coefficient in terms) + constant; no coefficient is 0."""

    terms: tuple[tuple[Expr, int], ...]
    constant: int

    def __add__(self, other: Linear) -> Linear:
        total = dict(self.terms)
        for atom, coefficient in other.terms:
            total[atom] = total.get(atom, 0) + coefficient
        return Linear(tuple((a, c) for a, c in total.items() if c), self.constant + other.constant)

    def __mul__(self, factor: int) -> Linear:
        return Linear(tuple((a, c * factor) for a, c in self.terms if factor), self.constant * factor)

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Linear) -> Linear:
        return self + -other

    def expr(self) -> Expr:
        """The sum as an expression, terms that are added before those that are subtracted."""
        total: Expr | None = None
        for atom, coefficient in sorted(self.terms, key=lambda term: term[1] < 0):
            scaled = apply("mul", atom, const(abs(coefficient)))
            if total is None:
                total = scaled if coefficient > 0 else apply("neg", scaled)
            else:
                total = apply("add" if coefficient > 0 else "sub", total, scaled)
        if total is None:
            return const(self.constant)
        if self.constant < 0:
            return apply("sub", total, const(-self.constant))
        return apply("add", total, const(self.constant))


def _small(form: Linear) -> bool:
    return all(abs(c) < COEFFICIENT_LIMIT for _, c in form.terms) and abs(form.constant) < COEFFICIENT_LIMIT


@lru_cache(maxsize=8192)
def linear(x: Expr) -> Linear:
    """The normal form of an integer expression."""
    atom = Linear(((x, 1),), 0)
    if x.kind != "int":
        return atom
    form = atom
    match x.op:
        case "const":
            form = Linear((), x.value)
        case "add":
            form = linear(x.args[0]) + linear(x.args[1])
        case "sub":
            form = linear(x.args[0]) - linear(x.args[1])
        case "neg":
            form = -linear(x.args[0])
        case "bitnot":  # ~x is -x - 1
            form = -linear(x.args[0]) + Linear((), -1)
        case "mul":
            left, right = linear(x.args[0]), linear(x.args[1])
            form = (
                left * right.constant
                if not right.terms
                else right * left.constant
                if not left.terms
                else atom
            )
        case "shl" if x.args[1].op == "const" and 0 <= x.args[1].value < 61:
            form = linear(x.args[0]) * (1 << x.args[1].value)
    # A coefficient that int64 cannot hold stays inside its atom, where its range is found too wide.
    return form if _small(form) else atom


def nonnegative(x: Expr) -> bool:
    """True if an integer is >= 0 for reasons visible in its form alone."""
    args = x.args
    match x.op:
        case "const":
            return bool(x.value >= 0)
        case "sym" | "abs" | "search":
            return True  # indices, lengths and reduction axes count from 0
        case "to_int":
            return args[0].kind == "bool"
        case "add" | "mul" | "floordiv" | "minimum":
            return all(map(nonnegative, args))
        case "where":
            return all(map(nonnegative, args[1:]))
        case "maximum" | "bitand":
            return any(map(nonnegative, args))
        case "shr":
            return nonnegative(args[0])
        case "mod":
            return args[1].op == "const" and bool(args[1].value > 0)
    return False
