"""Random integer expressions over numbers of all magnitudes, against exact arithmetic on Python's ints.

Whatever is computed equals the exact result at every pair, or an error of the project is raised. Ordinary
magnitudes raise nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.analyze.overflow import fits, fitted, index_ranges
from fa4flex.codegen.analyze.rules import VAGUE
from fa4flex.codegen.analyze.tiles import Shape, tile_map
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import INDICES, Expr, apply, const, load, nodes, reduce, scalar, search, sym, to_int
from fa4flex.errors import Fa4flexError
from fa4flex.runtime import cpu

SHAPE = Shape(2, 1, 7, 9)
LARGE = (2**31, 2**53 + 1, 2**61, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**70)
SMALL = (0, 1, 2, 3, 5, 7, 60)
TABLES = 3
"""Captured int64 tensors: per batch entry, per query, and a sorted one over the keys."""


class Undefined(Exception):
    """Python raises here: a division by 0, or a negative shift."""


class Draw:
    """Expressions over four captured numbers and three tensors, with their contents."""

    def __init__(self, seed: int, large: bool) -> None:
        self.random = random.Random(seed)
        self.large = large
        self.scalars = tuple(self.value(2**70) for _ in range(4))
        sizes = (SHAPE.batch, SHAPE.q_len, SHAPE.kv_len)
        rows = [[self.value(2**63 - 1) for _ in range(n)] for n in sizes]
        rows[2].sort()
        self.rows = rows
        self.captured = Captured(tuple(torch.tensor(row) for row in rows), self.scalars)

    def value(self, limit: int) -> int:
        """Random integer, at most `limit`; -limit - 1 takes part."""
        if not self.large or self.random.random() < 0.4:
            return self.random.choice((1, -1)) * self.random.choice(SMALL)
        sign = self.random.choice((1, -1))
        return max(-limit - 1, min(sign * self.random.choice(LARGE) + self.random.randint(-1, 1), limit))

    def leaf(self) -> Expr:
        kind = self.random.randrange(10)
        if kind < 5:
            return sym(self.random.choice(("q", "kv", "q", "kv", "b", "kv_len")))
        if kind < 7:
            return scalar(self.random.randrange(4), "int")
        if kind < 8:
            return const(self.value(2**70))
        slot, index = self.random.choice(((0, "b"), (1, "q"), (2, "kv")))
        return load(slot, (sym(index),), "int")

    def integer(self, depth: int) -> Expr:
        if depth <= 0:
            return self.leaf()
        a, b = self.integer(depth - 1), self.integer(depth - self.random.randint(1, 2))
        divisor = (
            b if self.large else apply("add", apply("mul", apply("mod", b, const(4)), const(2)), const(1))
        )
        steps = b if self.large else apply("mod", b, const(4))
        draws: list[Callable[[], Expr]] = [
            *[lambda: apply(self.random.choice(("add", "sub")), a, b)] * 5,
            lambda: apply("mul", a, b if self.large or depth < 2 else const(self.random.randint(-3, 3))),
            lambda: apply(self.random.choice(("neg", "abs", "bitnot", "sign")), a),
            lambda: apply(self.random.choice(("minimum", "maximum")), a, b),
            lambda: apply(self.random.choice(("floordiv", "mod", "truncdiv")), a, divisor),
            lambda: apply(self.random.choice(("bitand", "bitor", "bitxor")), a, b),
            lambda: apply("shr", a, steps),
            lambda: apply("shl", a, apply("mod", b, const(self.random.choice((2, 70)) if self.large else 3))),
            lambda: apply("where", self.boolean(depth - 1), a, b),
            lambda: to_int(self.boolean(depth - 1)),
            lambda: search(2, self.random.choice(("left", "right")), a),
            lambda: reduce(
                self.random.choice(("max", "min", "sum", "prod")[: 4 if self.large else 3]),
                "k0",
                3,
                apply("add", apply("mul", sym("k0"), a), b),
            ),
        ]  # fmt: skip
        return self.random.choice(draws)()

    def boolean(self, depth: int) -> Expr:
        if depth > 0 and self.random.random() < 0.4:
            some = [self.boolean(depth - 1) for _ in range(2)]
            return apply(self.random.choice(("and_", "or_", "xor")), *some)
        compare = self.random.choice(("lt", "le", "le", "eq", "ne"))
        return apply(compare, self.integer(depth), self.integer(depth - 1))


def exact(root: Expr, point: Mapping[str, int], draw: Draw) -> Any:
    """The value of `root`, in Python's arithmetic. Raises Undefined."""

    def divided(function: Callable[[int, int], int], a: int, b: int) -> int:
        if b == 0:
            raise Undefined
        return function(a, b)

    def shifted(left: bool, a: int, s: int) -> int:
        if s < 0:
            raise Undefined
        return a << min(s, 1000) if left else a >> min(s, 1000)

    def run(x: Expr, at: Mapping[str, int]) -> Any:
        match x.op:
            case "sym":
                return at[x.value]
            case "const":
                return x.value
            case "scalar":
                return draw.scalars[x.value]
            case "load":
                return draw.rows[x.value][run(x.args[0], at)]
            case "search":
                needle = run(x.args[0], at)
                left = x.value[1] == "left"
                return sum(y < needle if left else y <= needle for y in draw.rows[x.value[0]])
            case "where":
                return run(x.args[1 if run(x.args[0], at) else 2], at)
            case "reduce":
                how, axis, extent = x.value
                terms = [run(x.args[0], {**at, axis: i}) for i in range(extent)]
                if how == "prod":
                    return terms[0] * terms[1] * terms[2]
                return {"sum": sum, "max": max, "min": min, "any": any, "all": all}[how](terms)
        return ELEMENTWISE[x.op](*(run(a, at) for a in x.args))

    ELEMENTWISE: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "neg": lambda a: -a, "abs": abs, "bitnot": lambda a: ~a, "sign": lambda a: (a > 0) - (a < 0),
        "minimum": min, "maximum": max,
        "floordiv": lambda a, b: divided(lambda x, y: x // y, a, b),
        "mod": lambda a, b: divided(lambda x, y: x % y, a, b),
        "truncdiv": lambda a, b: divided(
            lambda x, y: abs(x) // abs(y) * (1 if (x >= 0) == (y > 0) else -1), a, b
        ),
        "bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b, "bitxor": lambda a, b: a ^ b,
        "shl": lambda a, s: shifted(True, a, s), "shr": lambda a, s: shifted(False, a, s),
        "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b, "and_": lambda a, b: a and b, "or_": lambda a, b: a or b,
        "xor": lambda a, b: a != b, "not_": lambda a: not a, "to_int": int, "to_bool": bool,
    }  # fmt: skip
    return run(root, point)


def everywhere(root: Expr, draw: Draw) -> list[Any]:
    """Exact values over all b, q, kv in this order; None where Python raises."""
    found = []
    for b in range(SHAPE.batch):
        for q in range(SHAPE.q_len):
            for kv in range(SHAPE.kv_len):
                point = {"b": b, "h": 0, "q": q, "kv": kv, "q_len": SHAPE.q_len, "kv_len": SHAPE.kv_len}
                try:
                    found.append(exact(root, point, draw))
                except Undefined:
                    found.append(None)
    return found


def symbols() -> dict[str, Any]:
    places = {
        "b": torch.arange(SHAPE.batch).view(-1, 1, 1),
        "q": torch.arange(SHAPE.q_len).view(-1, 1),
        "kv": torch.arange(SHAPE.kv_len),
    }
    return {**places, "h": 0, "q_len": SHAPE.q_len, "kv_len": SHAPE.kv_len, "num_heads": 1}


def computed(root: Expr, captured: Captured) -> list[Any]:
    (value,) = evaluate(fitted([root], SHAPE, captured), symbols(), captured)
    extents = SHAPE.batch, SHAPE.q_len, SHAPE.kv_len
    if not isinstance(value, Tensor):
        return [value] * (extents[0] * extents[1] * extents[2])
    return value.expand(extents).flatten().tolist()


def agree(found: list[Any], wanted: list[Any], root: Expr, draw: Draw) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert y is None or x == y, f"{root} is {x}, not {y}, with {draw.scalars} and {draw.rows}"


def allowed(mask: Expr, captured: Captured) -> list[bool]:
    """Pairs that the executor attends: with equal scores and values that name their key, weights above 0."""
    q, k = torch.zeros(SHAPE.batch, 1, SHAPE.q_len, 4), torch.zeros(SHAPE.batch, 1, SHAPE.kv_len, 4)
    v = torch.eye(SHAPE.kv_len).expand(SHAPE.batch, 1, -1, -1)
    inputs = cpu.Inputs(q, k, v, captured, tile=(3, 4))
    found: list[bool] = (cpu.forward(Facts(SCORE, mask), inputs).out > 0).flatten().tolist()
    return found


def test_large_integers_are_exact_or_refused(seed: int) -> None:
    for part in range(40):
        draw = Draw(seed * 1000 + part, large=True)
        root = draw.integer(draw.random.randint(1, 3))
        try:
            found = computed(root, draw.captured)
        except Fa4flexError:
            continue
        agree(found, everywhere(root, draw), root, draw)


def test_large_masks_are_exact_or_refused(seed: int) -> None:
    for part in range(25):
        draw = Draw(seed * 1000 + part, large=True)
        mask = draw.boolean(draw.random.randint(0, 2))
        wanted = everywhere(mask, draw)
        try:
            found = allowed(mask, draw.captured)
        except Fa4flexError:
            continue
        agree(found, wanted, mask, draw)
        for keys in (None, Facts(SCORE, mask).keys):
            classes = tile_map(mask, keys, SHAPE, draw.captured, (3, 4)).classes()
            check_classes(classes, wanted, mask, draw)


def check_classes(classes: Tensor, wanted: list[Any], mask: Expr, draw: Draw) -> None:
    """Empty tiles have no allowed pair, full ones no hidden pair; pairs without a value count as neither."""
    dense = [[wanted[(b * 7 + q) * 9 : (b * 7 + q) * 9 + 9] for q in range(7)] for b in range(2)]
    classes = classes.expand(2, *classes.shape[1:]) if classes.ndim == 3 else classes[:, 0].expand(2, -1, -1)
    for b, row, column in torch.cartesian_prod(*(torch.arange(n) for n in classes.shape)).tolist():
        values = [x for line in dense[b][row * 3 : row * 3 + 3] for x in line[column * 4 : column * 4 + 4]]
        kind = int(classes[b, row, column])
        forbidden = {0: True, 2: False}.get(kind)
        assert forbidden is None or forbidden not in values, f"{mask} with {draw.scalars} and {draw.rows}"


def test_ordinary_integers_raise_nothing(seed: int) -> None:
    for part in range(25):
        draw = Draw(seed * 1000 + part, large=False)
        root = draw.integer(draw.random.randint(1, 3))
        agree(computed(root, draw.captured), everywhere(root, draw), root, draw)
        mask = draw.boolean(draw.random.randint(0, 2))
        agree(allowed(mask, draw.captured), everywhere(mask, draw), mask, draw)


def test_ranges_hold_and_proofs_agree(seed: int) -> None:
    """Exact ranges contain every value; what is proved for all modest problems, they say as well."""
    for part in range(25):
        draw = Draw(seed * 1000 + part, large=True)
        root = draw.integer(draw.random.randint(1, 3))
        ranges = index_ranges([root], SHAPE, draw.captured)
        for node in nodes(root):
            if node.kind == "int" and node.free <= {*INDICES, "q_len", "kv_len"}:
                low, high = ranges[node]
                if any(
                    n.op == "shl" and max(map(abs, ranges[n])) >= VAGUE for n in nodes(node) if n in ranges
                ):
                    continue
                assert all(x is None or low <= x <= high for x in everywhere(node, draw)), f"{node} of {root}"
        inside = all(low >= -(2**63) and high < 2**63 for low, high in ranges.values())
        assert fits([root], SHAPE, draw.captured) == inside or inside


@pytest.fixture(params=range(12))
def seed(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number
