"""Interval arithmetic: every value at a point of a box lies in the range found for the box."""

from __future__ import annotations

import random

import pytest
import torch
from mask_zoo import KV, Q, op
from torch import Tensor

from fa4flex.codegen.analyze.bounds import Bounds, bounds
from fa4flex.codegen.analyze.rules import rule_for
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, apply, load, reduce, round_to, search, sym
from fa4flex.codegen.ops import OPS

SYMBOLS = ("q", "kv", "b")
NOTHING = Captured()
BOXES = 300
POINTS = 24


def random_boxes(low: int, high: int) -> tuple[dict[str, Bounds], dict[str, Tensor]]:
    """Intervals of the symbols over boxes [BOXES, 1], points and wide ones among them, and points inside."""
    boxes, points = {}, {}
    for name in SYMBOLS:
        width = torch.randint(0, 2, (BOXES, 1)) * torch.randint(0, max((high - low) // 4, 1) + 1, (BOXES, 1))
        lo = torch.randint(low, high + 1, (BOXES, 1))
        hi = (lo + width).clamp(max=high)
        boxes[name] = Bounds(lo, hi)
        inside = lo + (torch.rand(BOXES, POINTS) * (hi - lo + 1)).long()
        inside[:, :1], inside[:, 1:2] = lo, hi
        points[name] = torch.gather(inside, 1, torch.rand(BOXES, POINTS).argsort(1))
    return boxes, points


def check(root: Expr, captured: Captured = NOTHING, low: int = -40, high: int = 40) -> None:
    boxes, points = random_boxes(low, high)
    (found,) = bounds([root], boxes, Tables(captured))
    for dtype in (torch.float32, torch.float64):
        (value,) = evaluate([root], points, captured, dtype)
        value = torch.as_tensor(value).expand(BOXES, POINTS)
        lo, hi, nan = (torch.as_tensor(x).expand(BOXES, 1) for x in (found.lo, found.hi, found.nan))
        value = value.double() if value.is_floating_point() else value
        inside = ((lo <= value) & (value <= hi)) | (nan & value.isnan())
        if not inside.all():
            i, j = (~inside).nonzero()[0].tolist()
            box = {name: (int(x.lo[i]), int(x.hi[i])) for name, x in boxes.items()}
            raise AssertionError(
                f"{root} = {value[i, j].item()} at { {n: int(x[i, j]) for n, x in points.items()} } leaves "
                f"[{lo[i].item()}, {hi[i].item()}] found for {box} in {dtype}"
            )
        assert found.nan is False or root.kind == "float"


def float_values() -> list[Expr]:
    """Floats of several sizes and signs, one of them small enough for the domains of asin, acos, log1p."""
    x, y, z = (op("to_float", sym(name)) for name in SYMBOLS)
    third = op("div", x, 3.0)
    return [
        x,
        third,
        op("sub", op("mul", y, 0.03), 0.2),
        op("mul", z, op("add", third, 1.0e-3)),
        op("mul", x, 1.0e37),
    ]


def arguments(name: str, kind: str) -> list[Expr]:
    q, kv, b = (sym(n) for n in SYMBOLS)
    ints = [q, kv, op("sub", op("mul", q, 3), b), op("mod", kv, 5), op("mul", q, kv)]
    bools = [op("lt", q, kv), op("eq", op("mod", b, 3), 1), op("le", op("abs", q), 8)]
    if name == "where":
        return [random.choice(bools), *random.choices(float_values() if kind == "float" else ints, k=2)]
    values = {"int": ints, "float": float_values(), "bool": bools}[kind]
    chosen = random.choices(values, k=OPS[name].arity)
    if name in ("floordiv", "mod", "truncdiv") and kind == "int":  # torch raises on an integer zero divisor
        chosen[1] = random.choice(
            [op("add", op("abs", b), 1), op("sub", -1, op("abs", b)), op("sub", op("mul", b, 2), 1)]
        )
    if name in ("shl", "shr"):
        chosen[1] = op("mod", b, random.randint(1, 9))
    return chosen


def kinds_of(name: str) -> list[str]:
    if name in ("isnan", "isinf"):
        return ["float"]
    if OPS[name].takes in ("bool", "int", "float"):
        return [OPS[name].takes]
    if name in ("to_float", "to_int", "to_bool", "lt", "le", "eq", "ne"):
        return {"to_float": ["int", "bool"], "to_int": ["float", "bool"], "to_bool": ["int", "float"]}.get(
            name, ["int", "float", "bool"]
        )
    return ["int", "float"]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in OPS for kind in kinds_of(name)])
def test_every_operation(name: str, kind: str) -> None:
    assert callable(rule_for(name, kind))
    for _ in range(12):
        if name == "to_int" and kind == "float":
            finite = random.choice(float_values()[:4])  # what a number beyond int64 becomes is not defined
            check(apply(name, finite))
        else:
            check(apply(name, *arguments(name, kind)))


def test_values_from_nothing_but_points_are_exact() -> None:
    boxes = {name: Bounds(x, x) for name, x in zip(SYMBOLS, torch.randint(-50, 50, (3, 200)), strict=True)}
    at = {name: x.lo for name, x in boxes.items()}
    for name in OPS:
        if "int" in kinds_of(name) and OPS[name].gives != "float":
            root = apply(name, *arguments(name, "int"))
            (found,) = bounds([root], boxes, Tables(Captured()))
            (value,) = evaluate([root], at)
            assert torch.equal(torch.as_tensor(found.lo).expand(200), torch.as_tensor(value).expand(200)), (
                str(root)
            )
            assert torch.equal(torch.as_tensor(found.hi).expand(200), torch.as_tensor(value).expand(200)), (
                str(root)
            )


def test_sums_lose_nothing() -> None:
    boxes = {"q": Bounds(128, 255), "kv": Bounds(0, 127)}
    again = op("add", op("sub", Q, KV), KV)
    (found,) = bounds([again], boxes, Tables(Captured()))
    assert (found.lo, found.hi) == (128, 255)
    inside = op("le", op("sub", Q, 255), KV)
    outside = op("lt", op("sub", Q, 128), op("sub", KV, 127))
    touching = op("lt", op("sub", Q, 128), KV)
    found_all = bounds([inside, outside, touching], boxes, Tables(Captured()))
    assert [(x.lo, x.hi) for x in found_all] == [(True, True), (False, False), (False, True)]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32, torch.float64]
)
def test_tables(dtype: torch.dtype) -> None:
    kind = "float" if dtype.is_floating_point else "int"
    for shape, index in (
        ((90,), (op("add", Q, KV),)),
        ((90,), (op("sub", op("abs", Q), 90),)),
        ((90,), (Q,)),  # negative indices count from the end, in the middle of a box too
        ((90, 90), (Q, op("abs", KV))),
        ((5, 90), (op("mod", sym("b"), 5), op("sub", Q, KV))),
        ((9, 8, 7), (op("mod", Q, 9), op("mod", KV, 8), op("mod", op("add", Q, KV), 7))),
    ):
        values = torch.randn(shape) if kind == "float" else torch.randint(0, 200, shape)
        check(load(0, index, kind), Captured((values.to(dtype),)), -45, 44)


def test_bool_tables() -> None:
    for share in (0.02, 0.5, 0.98):
        check(load(0, (op("add", Q, KV),), "bool"), Captured((torch.rand(90) < share,)), -45, 44)
        check(load(0, (Q, op("abs", KV)), "bool"), Captured((torch.rand(90, 90) < share,)), -45, 44)


def test_range_queries_are_tight() -> None:
    """One index or two, short or long: the ends found are the smallest and largest element of the box."""
    lo = torch.randint(0, 300, (200, 2))
    hi = (lo + torch.randint(0, 6, (200, 2)) * torch.tensor([1, 40])).clamp(max=299)
    boxes = {"q": Bounds(lo[:, 0], hi[:, 0]), "kv": Bounds(lo[:, 1], hi[:, 1])}
    for table in (torch.randn(300, 300), torch.randint(-1000, 1000, (300, 300)), torch.rand(300, 300) < 0.01):
        kind = "float" if table.is_floating_point() else "bool" if table.dtype == torch.bool else "int"
        (found,) = bounds([load(0, (Q, KV), kind)], boxes, Tables(Captured((table,))))
        parts = [table[a:c, b:d] for (a, b), (c, d) in zip(lo.tolist(), (hi + 1).tolist(), strict=True)]
        least, most = (
            torch.stack([x.byte().amin() if kind == "bool" else x.amin() for x in parts]),
            torch.stack([x.byte().amax() if kind == "bool" else x.amax() for x in parts]),
        )
        assert torch.equal(found.lo.to(least.dtype), least)
        assert torch.equal(found.hi.to(most.dtype), most)


def test_large_tables_are_pooled_and_still_sound() -> None:
    table = torch.randint(-(2**40), 2**40, (1 << 20 | 77,))
    check(load(0, (op("add", op("mul", op("abs", Q), 20_000), op("abs", KV)),), "int"), Captured((table,)))


def test_nan_and_infinity_in_tables() -> None:
    table = torch.tensor([1.0, float("nan"), -2.0, float("inf"), 5.0]).repeat(18)
    for x in (load(0, (op("abs", Q),), "float"), op("sub", load(0, (Q,), "float"), load(0, (KV,), "float"))):
        check(x, Captured((table,)))
        check(op("lt", x, 2.0), Captured((table,)))
        check(op("not_", op("le", x, 2.0)), Captured((table,)))
        check(op("eq", x, x), Captured((table,)))


def test_search() -> None:
    table = torch.randint(-30, 30, (50,)).sort().values
    rows = torch.randint(-30, 30, (4, 50)).sort(1).values
    for side in ("left", "right"):
        check(search(0, side, op("add", Q, KV)), Captured((table,)))
        check(search(0, side, Q, (op("mod", sym("b"), 4),)), Captured((rows,)))


@pytest.mark.parametrize("how", ["sum", "prod", "max", "min", "any", "all"])
def test_reductions(how: str) -> None:
    axis = sym("k0")
    table = torch.randint(-3, 4, (6, 90))
    x = op("add", load(0, (axis, op("abs", Q)), "int"), op("mul", axis, op("sub", KV, Q)))
    for body in (x, op("to_float", x), op("eq", x, 0), reduce("max", "k1", 3, op("mul", sym("k1"), x))):
        if (body.kind == "bool") == (how in ("any", "all")):
            check(reduce(how, "k0", 5, body), Captured((table,)), -5, 5)


def test_rounding() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        check(round_to(dtype, op("div", op("to_float", Q), 7.0)))
