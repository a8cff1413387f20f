"""Elementwise torch operations, by torch's name, as operations of the grammar and compositions of them.

Formulas are those of the torch documentation. Where a formula overflows in a branch that `where` discards,
its argument is bounded first: the discarded branch then has a finite derivative too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fa4flex.codegen.expr import const
from fa4flex.codegen.ops import OPS, Operation
from fa4flex.codegen.trace.build import coerce, elementwise, made
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Value, scalar_of

Builder = Callable[..., Any]


def _plain(row: Operation) -> Builder:
    """The operation on torch's arguments, under torch's names for them."""
    if row.arity == 1:
        return lambda input: elementwise(row.name, input)
    return lambda input, other: elementwise(row.name, input, other)


def _is_bool(x: Value) -> bool:
    return x.expr.kind == "bool"


def _on_bools(op: str, logic: str | None) -> Builder:
    """torch's arithmetic on two bool tensors is logic, where it is defined at all."""

    def build(input: Any, other: Any) -> Value:
        a, b = coerce(input), coerce(other)
        if not (_is_bool(a) and _is_bool(b)):
            return elementwise(op, a, b)
        if logic is None:
            raise current().error(
                f"{op} of two bools: `{a.expr}` and `{b.expr}`",
                "numbers",
                "use ^ or & ~, or convert with .int()",
            )
        return elementwise(logic, a, b)

    return build


_add, _sub, mul = _on_bools("add", "or_"), _on_bools("sub", None), _on_bools("mul", "and_")
_minimum, _maximum = _on_bools("minimum", "and_"), _on_bools("maximum", "or_")


def _times(alpha: Any, other: Any) -> Any:
    return other if type(alpha) is int and alpha == 1 else mul(alpha, other)


def add(input: Any, other: Any, *, alpha: Any = 1) -> Value:
    return _add(input, _times(alpha, other))


def sub(input: Any, other: Any, *, alpha: Any = 1) -> Value:
    return _sub(input, _times(alpha, other))


def _int_or_bool(op: str, logic: str) -> Builder:
    def build(input: Any, other: Any) -> Value:
        a, b = coerce(input), coerce(other)
        for x in (a, b):
            if x.expr.kind == "float":
                raise current().error(f"{op} of the float `{x.expr}`", "bools or ints", "compare it first")
        return elementwise(logic if _is_bool(a) and _is_bool(b) else op, a, b)

    return build


def bitwise_not(input: Any) -> Value:
    x = coerce(input)
    if x.expr.kind == "float":
        raise current().error(f"~ of the float `{x.expr}`", "a bool or an int", "compare it first")
    return elementwise("not_" if _is_bool(x) else "bitnot", x)


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return elementwise("floordiv", input, other)
    return elementwise("truncdiv" if rounding_mode == "trunc" else "div", input, other)


def fmod(input: Any, other: Any) -> Value:
    """C's remainder: the sign is that of `input`."""
    a, b = coerce(input), coerce(other)
    if "float" not in (a.expr.kind, b.expr.kind):
        return sub(a, mul(elementwise("truncdiv", a, b), b))
    # The remainder of floats is exact; a multiple of the divisor taken off may have been rounded.
    rest = elementwise("mod", elementwise("abs", a), elementwise("abs", b))
    return where(elementwise("lt", a, 0), elementwise("neg", rest), rest)


def pow(input: Any, exponent: Any) -> Value:
    """Powers: small whole exponents are products (exact for ints, and as torch computes them)."""
    base, power = coerce(input), coerce(exponent)
    if power.expr.op == "const":
        special = _constant_power(base, power.expr.value)
        if special is not None:
            return special
    if base.expr.kind == "float" or power.expr.kind == "float":
        return elementwise("pow", base, power)
    if base.expr is const(2):
        return elementwise("shl", 1, power)
    raise current().error(
        given=f"the integer power `{base.expr}` ** `{power.expr}`",
        expected="a float base or exponent, a power of 2, or a constant exponent up to 8",
        fix="convert the base with .float()",
    )


def _constant_power(base: Value, power: float) -> Value | None:
    if power in (1, 2, 3, 4, 5, 6, 7, 8):
        result = base if base.expr.kind != "bool" else elementwise("to_int", base)
        factor = result
        for _ in range(int(power) - 1):
            result = mul(result, factor)
        return elementwise("to_float", result) if isinstance(power, float) else result
    if power == 0.5:
        return elementwise("sqrt", base)
    if power == -0.5:
        return reciprocal(elementwise("sqrt", base))
    return reciprocal(base) if power == -1 and base.expr.kind == "float" else None


def square(input: Any) -> Value:
    return mul(input, input)


def reciprocal(input: Any) -> Value:
    return elementwise("div", 1.0, input)


def where(condition: Any, input: Any = None, other: Any = None) -> Value:
    if input is None or other is None:
        raise current().error(
            "torch.where(condition) with one argument", "torch.where(condition, a, b)", "pass both choices"
        )
    return elementwise("where", condition, input, other)


def clamp(input: Any, min: Any = None, max: Any = None) -> Value:
    result = input if min is None else _maximum(input, min)
    return coerce(result if max is None else _minimum(result, max))


def _never_for_ints(op: str) -> Builder:
    def build(input: Any) -> Value:
        x = coerce(input)
        return elementwise(op, x) if x.expr.kind == "float" else made(const(False), x.dims)

    return build


isnan, isinf = _never_for_ints("isnan"), _never_for_ints("isinf")


def _whole(op: str) -> Builder:
    """Rounding of an int is the int."""

    def build(input: Any, *, decimals: int = 0) -> Value:
        if decimals:
            raise current().error(
                "round(decimals=...)", "rounding to whole numbers", "scale before and after"
            )
        x = coerce(input)
        return elementwise(op, x) if x.expr.kind == "float" else x

    return build


trunc = _whole("trunc")


def gelu(input: Any, *, approximate: str = "none") -> Value:
    """Hendrycks & Gimpel, arXiv:1606.08415: x Phi(x), or its tanh approximation."""
    if approximate == "none":
        inner = elementwise("erf", mul(input, math.sqrt(0.5)))
    else:
        cubed = mul(0.044715, mul(square(input), input))
        inner = elementwise("tanh", mul(math.sqrt(2 / math.pi), add(input, cubed)))
    return mul(mul(input, 0.5), add(1.0, inner))


def relu(input: Any, inplace: bool = False) -> Value:
    # `x <= 0`, not `x > 0`: a NaN then stays a NaN, and the derivative at 0 is torch's 0.
    x = coerce(input)
    return where(elementwise("le", x, 0), mul(x, 0) if x.expr.kind != "float" else 0.0, x)


def softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Value:
    scaled = mul(coerce(input), beta)
    bounded = _minimum(scaled, threshold)
    return where(
        elementwise("gt", scaled, threshold),
        input,
        div(elementwise("log1p", elementwise("exp", bounded)), beta),
    )


def elu(
    input: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0, inplace: bool = False
) -> Value:
    below = mul(alpha, elementwise("expm1", _minimum(mul(input, input_scale), 0.0)))
    return mul(scale, where(elementwise("gt", input, 0), input, below))


def _hardsigmoid(input: Any) -> Value:
    return div(clamp(add(input, 3.0), 0.0, 6.0), 6.0)


def logit(input: Any, eps: Any = None) -> Value:
    x = coerce(input) if eps is None else clamp(input, eps, sub(1.0, eps))
    return elementwise("log", div(x, sub(1.0, x)))


def logaddexp(input: Any, other: Any) -> Value:
    far = elementwise("neg", elementwise("abs", sub(input, other)))
    return add(_maximum(input, other), elementwise("log1p", elementwise("exp", far)))


def nan_to_num(input: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    largest = 3.4028234663852886e38
    finite = where(elementwise("eq", input, math.inf), largest if posinf is None else posinf, input)
    finite = where(elementwise("eq", input, -math.inf), -largest if neginf is None else neginf, finite)
    return where(isnan(input), nan, finite)


def _without_nan(choose: Builder) -> Builder:
    def build(input: Any, other: Any) -> Value:
        return where(isnan(input), other, where(isnan(other), input, choose(input, other)))

    return build


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    if not training or scalar_of(p) == 0:
        return coerce(input)
    raise current().error(
        "dropout inside a mod",
        "a mod that gives the same result every time it runs",
        "drop pairs in a mask, by a hash of their indices, as in docs/recipes.md",
    )


_OWN: dict[str, Builder] = {
    "add": add, "sub": sub, "mul": mul, "div": div, "pow": pow, "minimum": _minimum, "maximum": _maximum,
    "bitand": _int_or_bool("bitand", "and_"), "bitor": _int_or_bool("bitor", "or_"),
    "bitxor": _int_or_bool("bitxor", "xor"), "bitnot": bitwise_not,
    "where": where, "isnan": isnan, "isinf": isinf,
    **{name: _whole(name) for name in ("floor", "ceil", "round", "trunc")},
}  # fmt: skip
"""Operations for which torch's functions are more than the operation on the same arguments."""

_COMPOSED: dict[str, Builder] = {
    **dict.fromkeys(("gt", "greater"), lambda input, other: elementwise("gt", input, other)),
    **dict.fromkeys(("ge", "greater_equal"), lambda input, other: elementwise("ge", input, other)),
    "rsub": lambda input, other, *, alpha=1: sub(other, input, alpha=alpha),
    "rpow": lambda input, other: pow(other, input), "rdiv": lambda input, other: div(other, input),
    "rfloordiv": lambda input, other: elementwise("floordiv", other, input),
    "rmod": lambda input, other: elementwise("mod", other, input), "fmod": fmod,
    # fmin and fmax ignore a NaN, minimum and maximum return it.
    "fmin": _without_nan(_minimum), "fmax": _without_nan(_maximum),
    **dict.fromkeys(("clamp", "clip"), clamp),
    "clamp_min": lambda input, min: clamp(input, min=min),
    "clamp_max": lambda input, max: clamp(input, max=max),
    "masked_fill": lambda input, mask, value: where(mask, value, input),
    "square": square, "reciprocal": reciprocal,
    "rsqrt": lambda input: reciprocal(elementwise("sqrt", input)),
    "isfinite": lambda input: elementwise("not_", elementwise("or_", isnan(input), isinf(input))),
    "isposinf": lambda input: elementwise("eq", input, math.inf),
    "isneginf": lambda input: elementwise("eq", input, -math.inf),
    "nan_to_num": nan_to_num, "frac": lambda input: sub(input, trunc(input)),
    "erfc": lambda input: sub(1.0, elementwise("erf", input)),
    "log10": lambda input: mul(elementwise("log", input), 1 / math.log(10.0)),
    "deg2rad": lambda input: mul(input, math.pi / 180), "rad2deg": lambda input: mul(input, 180 / math.pi),
    "hypot": lambda input, other: elementwise("sqrt", add(square(input), square(other))),
    "lerp": lambda input, end, weight: add(input, mul(weight, sub(end, input))),
    "addcmul": lambda input, tensor1, tensor2, *, value=1: add(input, mul(value, mul(tensor1, tensor2))),
    "addcdiv": lambda input, tensor1, tensor2, *, value=1: add(input, mul(value, div(tensor1, tensor2))),
    "logaddexp": logaddexp, "logit": logit, "gelu": gelu, "softplus": softplus, "elu": elu, "relu": relu,
    "relu6": lambda input, inplace=False: clamp(input, 0.0, 6.0),
    "leaky_relu": lambda input, negative_slope=0.01, inplace=False: where(
        elementwise("gt", input, 0), input, mul(input, negative_slope)),
    # Klambauer et al., arXiv:1706.02515.
    "selu": lambda input, inplace=False: elu(input, alpha=1.6732632423543772, scale=1.0507009873554805),
    "silu": lambda input, inplace=False: mul(input, elementwise("sigmoid", input)),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: clamp(input, min_val, max_val),
    "hardsigmoid": lambda input, inplace=False: _hardsigmoid(input),
    "hardswish": lambda input, inplace=False: mul(input, _hardsigmoid(input)),
    **dict.fromkeys(
        ("logsigmoid", "log_sigmoid"),
        lambda input: elementwise("neg", softplus(elementwise("neg", input)))),
    "mish": lambda input, inplace=False: mul(input, elementwise("tanh", softplus(input))),
    "softsign": lambda input: div(input, add(1.0, elementwise("abs", input))),
    "tanhshrink": lambda input: sub(input, elementwise("tanh", input)),
    "dropout": dropout,
}  # fmt: skip
"""Functions by formulas of others, those of the torch documentation."""


ELEMENTWISE: dict[str, Builder] = {
    **{name: _OWN.get(row.name) or _plain(row) for row in OPS.values() for name in row.torch},
    **_COMPOSED,
}
