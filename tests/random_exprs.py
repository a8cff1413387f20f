"""Random score and mask expressions over a small problem: every operation a device has code for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from fa4flex.codegen import expr
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, apply, const, load, scalar, search, sym, to_float, to_int

KEYS, QUERIES, BATCH, HEADS = 13, 11, 2, 2
SLOPES, IDS, SORTED, FLAGS, ROWS = range(5)
COUNT, HALF, NEGATIVE, BACK = range(4)


def captured() -> Captured:
    """Tensors and numbers by the slots above."""
    return Captured(
        (
            torch.randn(HEADS, 40),
            torch.randint(-5, 30, (40,), dtype=torch.int32),
            torch.randint(0, 20, (20,)).sort().values,
            torch.rand(BATCH, KEYS) < 0.5,
            torch.randn(BATCH, QUERIES, 5),
        ),
        (3, 0.7, -2.5, -4),
    )


class Draw:
    """Expressions by kind and depth; integers stay small, and floats within domains of functions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _one(self, choices: list[Callable[[], Expr]]) -> Expr:
        return self._random.choice(choices)()

    def _pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def integer(self, depth: int) -> Expr:
        q, kv = sym("q"), sym("kv")
        if depth <= 0:
            leaves = [q, kv, apply("sub", kv, q), apply("sub", q, kv), const(self._random.randint(-6, 9))]
            return self._pick(*leaves, *map(sym, ("b", "h", "q_len", "kv_len")), scalar(COUNT, "int"))

        def some() -> Expr:
            return self.integer(depth - 1)

        def within(n: int) -> Expr:
            return apply("mod", some(), const(n))

        divisors = (*map(const, (1, 2, 3, 5, 8, -3)), scalar(COUNT, "int"), scalar(BACK, "int"))
        return self._one(
            [
                lambda: apply(self._pick("add", "sub", "minimum", "maximum", "bitand"), some(), some()),
                lambda: apply("sub", some(), some()),
                lambda: apply("mul", some(), const(self._random.randint(-4, 5))),
                lambda: apply("mul", within(7), within(5)),
                lambda: apply(self._pick("neg", "abs", "sign", "bitnot"), some()),
                lambda: apply(self._pick("floordiv", "mod"), some(), self._pick(*divisors)),
                lambda: apply(
                    self._pick("floordiv", "mod", "truncdiv"), some(), apply("add", within(4), const(1))
                ),
                lambda: apply("where", self.boolean(depth - 1), some(), some()),
                lambda: load(IDS, (apply("sub", within(60), const(20)),), "int"),
                lambda: search(SORTED, self._pick("left", "right"), some()),
                lambda: to_int(self.boolean(depth - 1)),
                lambda: apply(self._pick("shr", "shl"), some(), const(self._random.randint(0, 2))),
                lambda: expr.reduce(
                    self._pick("sum", "max", "min"),
                    "r1",
                    4,
                    apply("add", apply("mod", apply("mul", sym("r1"), some()), const(11)), some()),
                ),
            ]
        )

    def boolean(self, depth: int) -> Expr:
        compare = self._pick("lt", "le", "eq", "ne")
        if depth <= 0:
            return apply(compare, self.integer(0), self.integer(0))

        def some() -> Expr:
            return self.boolean(depth - 1)

        def number() -> Expr:
            return self.integer(depth - 1)

        return self._one(
            [
                lambda: apply(compare, number(), number()),
                lambda: apply(compare, number(), number()),
                lambda: apply(self._pick("and_", "or_", "xor"), some(), some()),
                lambda: apply("not_", some()),
                lambda: load(FLAGS, (sym("b"), apply("mod", number(), const(KEYS))), "bool"),
                lambda: expr.reduce(
                    self._pick("any", "all"),
                    "r2",
                    3,
                    apply("lt", apply("mul", sym("r2"), number()), number()),
                ),
            ]
        )

    def number(self, depth: int) -> Expr:
        q, kv, h = (to_float(sym(n)) for n in ("q", "kv", "h"))
        if depth <= 0:
            leaves = (sym("score"), q, kv, h, to_float(apply("sub", sym("kv"), sym("q"))))
            return self._pick(*leaves, sym("score"), scalar(HALF, "float"), const(self._pick(0.5, -1.5, 2.0)))

        def some() -> Expr:
            return self.number(depth - 1)

        def magnitude() -> Expr:
            return apply("add", apply("abs", some()), const(0.1))

        slow = (
            const(3.0),
            scalar(NEGATIVE, "float"),
            apply("add", h, const(1.0)),
            apply("add", q, const(1.0)),
        )
        return self._one(
            [
                lambda: apply(self._pick("add", "sub", "minimum", "maximum"), some(), some()),
                lambda: apply(self._pick("add", "sub"), some(), some()),
                lambda: apply("mul", some(), self._pick(self.number(0), apply("tanh", some()))),
                lambda: apply("div", some(), self._pick(magnitude(), *slow)),
                lambda: apply(
                    self._pick("neg", "abs", "tanh", "sigmoid", "sin", "erf", "atan", "sign"), some()
                ),
                lambda: apply("exp", apply("tanh", some())),
                lambda: apply(self._pick("log", "log2", "sqrt", "log1p"), magnitude()),
                lambda: apply(
                    "where", self.boolean(depth - 1), some(), self._pick(some(), const(-torch.inf))
                ),
                lambda: to_float(self.integer(depth - 1)),
                lambda: to_float(self.integer(depth - 1)),
                lambda: load(SLOPES, (sym("h"), apply("mod", self.integer(depth - 1), const(40))), "float"),
                lambda: load(ROWS, (sym("b"), sym("q"), const(-2)), "float"),
                lambda: apply(
                    self._pick("floor", "round", "ceil"), apply("mul", self.number(0), const(0.37))
                ),
                self._jump,
                lambda: apply("pow", apply("abs", some()), const(self._pick(2.0, 3.0, 0.5, 1.5))),
                lambda: expr.round_to("float16", apply("tanh", some())),
                self._dot_product,
            ]
        )

    def _jump(self) -> Expr:
        """Functions of indices that are whole numbers, or almost."""
        x, by = to_float(self.integer(1)), const(self._pick(3.0, 41.0, -7.0, 0.1))
        if self._random.random() < 0.5:
            return apply(self._pick("floor", "ceil", "round", "trunc"), apply("div", x, by))
        return apply(self._pick("floordiv", "mod", "truncdiv"), x, by)

    def _dot_product(self) -> Expr:
        r = sym("r3")
        place = apply("mod", apply("add", sym("kv"), apply("mul", r, self.integer(0))), const(40))
        row, column = load(ROWS, (sym("b"), sym("q"), r), "float"), load(SLOPES, (sym("h"), place), "float")
        return expr.reduce("sum", "r3", 5, apply("mul", row, column))

    def score(self) -> Expr:
        """A score mod: any expression, a bias, or a soft cap of either sign."""
        drawn = self.number(self._pick(2, 3, 3, 4))
        cap = self._pick(const(-3.0), const(2.0), scalar(HALF, "float"), scalar(NEGATIVE, "float"))
        return self._pick(
            drawn,
            apply("add", sym("score"), drawn),
            apply("mul", cap, apply("tanh", apply("div", drawn, cap))),
        )
