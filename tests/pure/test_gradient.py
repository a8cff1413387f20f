"""Derivatives of expressions against torch.autograd run through the same expression's evaluation."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from fa4flex.codegen.analyze.gradient import classify, quotient, score_gradient, written_once
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, apply, const, load, reduce, round_to, substitute, sym, to_float
from fa4flex.codegen.ops import OPS, Operation

SCORE, Q, KV, H = sym("score"), sym("q"), sym("kv"), sym("h")
ROWS, KEYS = 5, 7
F64 = torch.float64
TORCH_HAS_NO_DERIVATIVE = ("floordiv", "truncdiv")


def grid() -> dict[str, Tensor | int]:
    return {"b": 0, "h": 1, "q": torch.arange(ROWS).view(-1, 1), "kv": torch.arange(KEYS)}


def by_autograd(x: Expr, score: Tensor, tables: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (score, *tables)]
    (value,) = evaluate([x], grid() | {"score": leaves[0]}, Captured(tuple(leaves[1:])), F64)
    if not isinstance(value, Tensor) or not value.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    value = value.expand(ROWS, KEYS)
    found = torch.autograd.grad(value, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves)]


def by_expression(x: Expr, score: Tensor, tables: list[Tensor], upstream: Tensor) -> list[Tensor]:
    gradient = score_gradient(x)
    symbols, captured = grid() | {"score": score}, Captured(tuple(tables))
    (by_score,) = evaluate([gradient.by_score], symbols, captured, F64)
    grads = [by_score * upstream, *(torch.zeros_like(t) for t in tables)]
    for term in gradient.captured:
        for point in itertools.product(*(range(n) for _, n in term.axes)):
            axes = dict(zip((name for name, _ in term.axes), point))
            value, *index = evaluate([term.value, *term.index], symbols | axes, captured, F64)
            where = [torch.as_tensor(i).expand(ROWS, KEYS) for i in index]
            grads[1 + term.slot].index_put_(where, (value * upstream).expand(ROWS, KEYS), accumulate=True)
    return grads


def check(x: Expr, score: Tensor, tables: list[Tensor]) -> None:
    upstream = torch.randn(ROWS, KEYS, dtype=F64)
    expected = by_autograd(x, score, tables, upstream)
    for got, want in zip(by_expression(x, score, tables, upstream), expected):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def uniform(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=F64)


CHOICES = ("where", "with_grad", "to_float", "detach")
FUNCTIONS = [row for row in OPS.values() if row.gives in ("same", "float") and row.name not in CHOICES]


def domain(row: Operation) -> tuple[float, float]:
    """Interval in which a function is smooth."""
    if row.name in ("pow", "div", "mod", "floordiv", "truncdiv"):
        return 0.3, 3.0
    low, high = (row.range.low, row.range.high) if row.range else (-math.inf, math.inf)
    if row.arity == 2 or math.isinf(low):
        return -2.0, 2.0
    return (low + 0.1, low + 3.0) if math.isinf(high) else (low + 0.1, high - 0.1)


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row.name)
def test_operation(row: Operation) -> None:
    low, high = domain(row)
    score, table = uniform(low, high, ROWS, KEYS), uniform(low, high, ROWS)
    args = (SCORE, load(0, (Q,), "float"))[: row.arity]
    if row.name in TORCH_HAS_NO_DERIVATIVE:
        assert score_gradient(apply(row.name, *args)).by_score is const(0.0)
        return
    check(apply(row.name, *args), score, [table])
    check(apply("mul", apply(row.name, *args[::-1]), apply("sin", SCORE)), score, [table])


def test_ties_share_the_gradient() -> None:
    same = uniform(-1, 1, ROWS)
    score = same.view(-1, 1).repeat(1, KEYS)
    for op in ("minimum", "maximum"):
        check(apply(op, SCORE, load(0, (Q,), "float")), score, [same])


def test_abs_is_flat_at_zero() -> None:
    check(apply("abs", SCORE), torch.zeros(ROWS, KEYS, dtype=F64), [])


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, -1.5, 0.5])
def test_power_with_constant_exponent(exponent: float) -> None:
    check(apply("pow", SCORE, const(exponent)), uniform(0.2, 2, ROWS, KEYS), [])


def test_power_of_zero() -> None:
    score = torch.zeros(ROWS, KEYS, dtype=F64)
    check(
        apply("pow", SCORE, load(0, (Q,), "float")),
        score,
        [torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0], dtype=F64)],
    )


def test_detach_integers_and_declared_slopes() -> None:
    score = uniform(-1, 1, ROWS, KEYS)
    assert score_gradient(apply("detach", SCORE)).by_score is const(0.0)
    assert score_gradient(to_float(apply("to_int", SCORE))).by_score is const(0.0)
    declared = apply("with_grad", apply("exp", SCORE), SCORE, apply("cos", SCORE))
    (got,) = evaluate(
        [score_gradient(apply("mul", declared, const(3.0))).by_score], {"score": score}, dtype=F64
    )
    torch.testing.assert_close(got, 3 * score.cos())
    (rounded,) = evaluate([score_gradient(round_to("bfloat16", SCORE)).by_score], {"score": score}, dtype=F64)
    assert rounded == 1


def test_unselected_branches_leave_no_nan() -> None:
    """sqrt is steep at 0 and log is NaN below it: neither may pass a `where` that excludes it."""
    positive = apply("lt", const(0.0), SCORE)
    x = apply("where", positive, apply("mul", apply("sqrt", SCORE), apply("log", SCORE)), const(0.0))
    score = torch.tensor([-1.0, 0.0, 4.0], dtype=F64)
    (got,) = evaluate([score_gradient(x).by_score], {"score": score}, dtype=F64)
    want = [0.0, 0.0, math.log(4) / 4 + 2 / 4]
    torch.testing.assert_close(got, torch.tensor(want, dtype=F64))


def test_reductions() -> None:
    i = sym("i")
    u, w = uniform(0.5, 2, ROWS, 3), uniform(0.5, 2, KEYS, 3)
    term = apply("mul", load(0, (Q, i), "float"), load(1, (KV, i), "float"))
    score = uniform(-1, 1, ROWS, KEYS)
    for how in ("sum", "prod", "max", "min"):
        # Under the loop: tables, the score itself, and the same with the loop's result used outside.
        check(apply("add", SCORE, reduce(how, "i", 3, term)), score, [u, w])
        inner = apply("mul", term, apply("sin", SCORE))
        check(apply("mul", reduce(how, "i", 3, inner), apply("cos", SCORE)), score, [u, w])


def test_product_with_a_zero_factor() -> None:
    u = torch.tensor([[0.0, 2.0, 3.0]] * ROWS, dtype=F64)
    check(reduce("prod", "i", 3, load(0, (Q, sym("i")), "float")), torch.zeros(ROWS, KEYS, dtype=F64), [u])


def test_a_loop_around_its_own_closed_sum() -> None:
    """d exp(sum_ij t[i,j] w[j]) / d w[j] holds a loop over i next to the closed loops over i and j."""
    i, j = sym("i"), sym("j")
    body = apply("mul", load(0, (i, j), "float"), load(1, (j,), "float"))
    x = apply("exp", reduce("sum", "i", 2, reduce("sum", "j", 3, apply("mul", body, SCORE))))
    check(x, uniform(-1, 1, ROWS, KEYS), [uniform(-1, 1, 2, 3), uniform(-1, 1, 3)])
    largest = reduce("max", "i", 2, reduce("sum", "j", 3, apply("mul", body, SCORE)))
    check(
        apply("mul", largest, largest), uniform(-1, 1, ROWS, KEYS), [uniform(-1, 1, 2, 3), uniform(-1, 1, 3)]
    )


def test_an_axis_is_replaced_outside_of_its_loop_alone() -> None:
    """The terms of a read along an axis may contain the sum over that axis."""
    i, j = sym("i"), sym("j")
    row = load(0, (i,), "float")
    total, first = reduce("sum", "i", 5, row), load(0, (const(0),), "float")
    assert substitute(apply("mul", row, total), {i: const(0)}) is apply("mul", first, total)
    outer = reduce("sum", "i", 5, apply("mul", row, load(1, (i, j), "float")))
    found = substitute(outer, {i: const(0), j: const(1)})
    assert found is reduce("sum", "i", 5, apply("mul", row, load(1, (i, const(1)), "float")))


def test_two_loops_over_one_axis_name_stay_apart() -> None:
    body = apply("mul", SCORE, load(0, (sym("i"),), "float"))
    x = apply("add", reduce("sum", "i", 2, body), apply("sin", reduce("prod", "i", 3, body)))
    check(x, uniform(-1, 1, ROWS, KEYS), [uniform(0.5, 2, 3)])


def test_nested_reductions() -> None:
    i, j = sym("i"), sym("j")
    body = apply("mul", load(0, (i, j), "float"), apply("add", SCORE, load(1, (Q, i), "float")))
    x = reduce("prod", "i", 2, reduce("sum", "j", 3, apply("sin", body)))
    check(x, uniform(-1, 1, ROWS, KEYS), [uniform(0.5, 2, 2, 3), uniform(0.5, 2, ROWS, 2)])


UNARY = ("sin", "cos", "tanh", "sigmoid", "erf", "exp", "atan", "neg", "abs", "expm1")
BINARY = ("add", "sub", "mul", "minimum", "maximum", "atan2")


def random_expression(rng: random.Random, depth: int) -> Expr:
    if depth == 0:
        leaves = [
            SCORE,
            const(rng.uniform(-2, 2)),
            load(0, (Q,), "float"),
            load(1, (Q, KV), "float"),
            to_float(KV),
        ]
        return rng.choice(leaves)
    parts = [random_expression(rng, depth - 1) for _ in range(2)]
    match rng.choice(("unary", "binary", "binary", "where", "sum")):
        case "unary":
            return apply(rng.choice(UNARY), apply("sin", parts[0]))
        case "binary":
            return apply(rng.choice(BINARY), *parts)
        case "where":
            return apply("where", apply("lt", parts[0], parts[1]), *parts[::-1])
        case _:
            loop = apply("mul", parts[0], load(2, (sym("i"), KV), "float"))
            return reduce("sum", "i", 2, loop)


def test_random_expressions(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        tables = [uniform(-1, 1, ROWS), uniform(-1, 1, ROWS, KEYS), uniform(-1, 1, 2, KEYS)]
        check(random_expression(rng, rng.randint(1, 4)), uniform(-1, 1, ROWS, KEYS), tables)


def test_shared_work_is_shared() -> None:
    """The derivative of a soft cap uses the tanh that the score has computed."""
    tanh = apply("tanh", apply("div", SCORE, const(20.0)))
    gradient = score_gradient(apply("mul", tanh, const(20.0)))
    assert str(gradient.by_score) == f"1.0 - ({tanh} * {tanh})"


def difference(*, times: int = 1) -> Expr:
    return apply("mul", apply("sub", Q, KV), const(times))


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        ((H,), "constant in q and kv"),
        ((), "constant in q and kv"),
        ((sym("b"), H, Q), "constant in kv"),
        ((apply("floordiv", KV, const(2)),), "constant in q"),
        ((H, apply("add", difference(), const(9))), "diagonal"),
        ((apply("sub", apply("add", Q, const(4)), KV),), "diagonal"),
        ((apply("minimum", apply("maximum", difference(times=2), const(-3)), H),), "diagonal"),
        ((apply("add", Q, KV),), "general"),
        ((apply("sub", apply("mul", Q, const(2)), KV),), "general"),
        ((Q, apply("sub", Q, KV)), "general"),
        ((apply("mul", Q, KV),), "general"),
        ((load(0, (difference(),), "int"),), "general"),
    ],
)
def test_patterns(index: tuple[Expr, ...], pattern: str) -> None:
    assert classify(index) == pattern


B = sym("b")


@pytest.mark.parametrize(
    ("index", "alone", "once"),
    [
        ((B, H, Q, KV), (), True),
        ((KV, const(0), H, Q, B), (), True),
        ((H, Q, KV), (), False),
        ((H, Q, KV), ("b",), True),
        ((B, apply("floordiv", H, const(2)), Q, KV), (), False),
        ((B, H, Q, apply("sub", Q, KV)), (), False),
        ((B, H, Q, KV, apply("sub", Q, KV)), (), False),
    ],
)
def test_elements_of_one_pair(index: tuple[Expr, ...], alone: tuple[str, ...], once: bool) -> None:
    found = score_gradient(apply("add", SCORE, load(0, index, "float"))).captured
    assert written_once(found, alone) == once
    assert not written_once(found * 2, ("b", "h"))


def test_what_a_slope_is_multiplied_by() -> None:
    """Inside a soft cap, derivatives by captured tensors are the slope times something without scores."""
    slope_of_head = load(0, (H,), "float")
    inner = apply("add", SCORE, apply("mul", slope_of_head, to_float(apply("sub", KV, Q))))
    gradient = score_gradient(apply("tanh", inner))
    (term,) = gradient.captured
    rest = quotient(term.value, gradient.by_score)
    assert rest is to_float(apply("sub", KV, Q))
    assert quotient(rest, gradient.by_score) is None


def test_an_angle_at_the_origin_has_no_slope() -> None:
    zero = apply("sub", to_float(KV), to_float(KV))
    check(apply("atan2", apply("mul", SCORE, zero), zero), uniform(-1, 1, ROWS, KEYS), [])
