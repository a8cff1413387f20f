"""Approximations: within the errors that the ISA documents, and exactly its tables of special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from exact import (
    NAN,
    SHAPES,
    Value,
    bits,
    expected,
    flush,
    largest,
    product,
    quotient,
    sample,
    smallest,
    value,
)
from lanes import apply


def float_of(code: int, type: str) -> float:
    x = value(code, type)
    return x if isinstance(x, float) else float(x)


def outcome(function: Callable[[float], float], x: float) -> float:
    try:
        return function(x)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def ulp(x: float, type: str = "f32") -> float:
    """Unit in the last place of a format near x."""
    exponent_bits, fraction_bits = SHAPES[type]
    low = 2 - (1 << (exponent_bits - 1))
    return 2.0 ** (max(math.frexp(x)[1] - 1, low) - fraction_bits)


Bound = Callable[[float, float], float]
"""The allowed error, by operand and exact result."""
FUNCTIONS: dict[str, tuple[Callable[[float], float], Bound]] = {
    "ex2": (lambda x: 2.0**x, lambda x, y: 2 * ulp(y)),
    "lg2": (math.log2, lambda x, y: 2**-22 if 0.5 < x < 2 else abs(y) * 2**-22),
    "rcp": (lambda x: 1 / x, lambda x, y: ulp(y)),
    "sqrt": (math.sqrt, lambda x, y: abs(y) * 2**-23 or 1e-300),
    "rsqrt": (lambda x: 1 / math.sqrt(x), lambda x, y: abs(y) * 2**-22.9),
    "sin": (math.sin, lambda x, y: 2**-20.5 if abs(x) <= 2 * math.pi else 2**-14.7),
    "cos": (math.cos, lambda x, y: 2**-20.5 if abs(x) <= 2 * math.pi else 2**-14.7),
    "tanh": (math.tanh, lambda x, y: max(abs(y) * 2**-11, 2.0**-149)),
}
# what the ISA's tables fix, for -inf, -normal, -0, +0, +inf; NaN gives NaN everywhere
TABLES = {
    "ex2": ("0", "", "1", "1", "inf"),
    "lg2": ("nan", "nan", "-inf", "-inf", "inf"),
    "rcp": ("-0", "", "-inf", "inf", "0"),
    "sqrt": ("nan", "nan", "-0", "0", "inf"),
    "rsqrt": ("nan", "nan", "-inf", "inf", "0"),
    "sin": ("nan", "", "-0", "0", "nan"),
    "cos": ("nan", "", "1", "1", "nan"),
    "tanh": ("-1", "", "-0", "0", "1"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_approximations(name: str) -> None:
    function, bound = FUNCTIONS[name]
    with np.errstate(over="ignore"):
        values = np.concatenate(
            [
                np.random.uniform(-300, 300, 64),
                np.random.uniform(-2, 2, 64),
                np.exp2(np.random.uniform(-149, 128, 64)) * np.random.choice([-1, 1], 64),
            ]
        ).astype(np.float32)
    for codes in values.view(np.uint32).reshape(-1, 32).tolist():
        for ftz in ("",) if name == "tanh" else ("", ".ftz"):
            got = apply(f"{name}.approx{ftz}.f32", "f32", ("f32", codes))
            for code, found in zip(codes, got):
                x = float_of(flush(code, "f32") if ftz else code, "f32")
                if x == 0:
                    continue
                y, z = outcome(function, x), float_of(found, "f32")
                if ftz and abs(y) < 2.0**-126:
                    assert z == 0 and math.copysign(1, z) == math.copysign(1, y)
                elif math.isnan(y):
                    assert found == NAN["f32"]
                elif abs(y) > float_of(largest("f32"), "f32"):
                    assert z == math.copysign(math.inf, y)
                else:
                    assert abs(z - y) <= bound(x, y), (name, x, y, z)


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_special_values(name: str) -> None:
    special = [0xFF800000, 0xC2480000, 0x80000000, 0, 0x7F800000, 0x7FC00001, 0xFFABCDEF, 0xBF000000] * 4
    want = [*TABLES[name], "nan", "nan", TABLES[name][1]] * 4
    for ftz in ("",) if name == "tanh" else ("", ".ftz"):
        for found, text in zip(apply(f"{name}.approx{ftz}.f32", "f32", ("f32", special)), want):
            if text:
                number = float(text)
                assert found == (
                    NAN["f32"]
                    if math.isnan(number)
                    else bits(number if number in (0, math.inf, -math.inf) else Fraction(number), "f32")
                ), (name, text)


def test_flushed_subnormals() -> None:
    tiny = [0x00000001, 0x807FFFFF] * 16
    for name, want in (
        ("ex2", (0x3F800000, 0x3F800000)),
        ("lg2", (0xFF800000, 0xFF800000)),
        ("rcp", (0x7F800000, 0xFF800000)),
        ("sqrt", (0, 0x80000000)),
        ("rsqrt", (0x7F800000, 0xFF800000)),
        ("sin", (0, 0x80000000)),
        ("cos", (0x3F800000, 0x3F800000)),
    ):
        assert apply(f"{name}.approx.ftz.f32", "f32", ("f32", tiny)) == list(want) * 16, name
    assert apply("rcp.approx.ftz.f32", "f32", ("f32", [0x7F000001, 0xFF000001] * 16)) == [0, 0x80000000] * 16
    assert apply("ex2.approx.ftz.f32", "f32", ("f32", [0xC2FC0001, 0xC2FC0000] * 16)) == [0, 0x00800000] * 16


@pytest.mark.parametrize("form", ["approx", "full"])
def test_approximate_division(form: str) -> None:
    for ftz in ("", ".ftz"):
        for _ in range(3):
            rows = list(zip(sample("f32"), sample("f32")))
            got = apply(f"div.{form}{ftz}.f32", "f32", *(("f32", c) for c in zip(*rows)))
            for found, row in zip(got, rows):
                a, b = (value(flush(c, "f32") if ftz else c, "f32") for c in row)
                if form == "approx" and isinstance(b, Fraction) and abs(b) > 2**126:
                    exact: Value = product(a, math.copysign(0.0, b))
                else:
                    exact = quotient(a, b)
                want = expected(exact, "f32", "rn", ftz)
                assert want is not None and abs(found - want) <= 2, (form, [hex(c) for c in row])


@pytest.mark.parametrize("name", ["ex2", "tanh"])
@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_half_approximations(name: str, type: str) -> None:
    function = FUNCTIONS[name][0]
    error = {
        ("ex2", "f16"): 2**-9.9,
        ("ex2", "bf16"): 2**-7,
        ("tanh", "f16"): 2**-10.987,
        ("tanh", "bf16"): 2**-8,
    }
    ftz = ".ftz" if (name, type) == ("ex2", "bf16") else ""
    top = float_of(largest(type), type)
    for suffix in ("", "x2"):
        codes = [sample(type), sample(type)]
        if suffix:
            both = apply(
                f"{name}.approx{ftz}.{type}x2", "b32", ("b32", [h << 16 | low for low, h in zip(*codes)])
            )
            got = [[x & 0xFFFF for x in both], [x >> 16 for x in both]]
        else:
            got = [apply(f"{name}.approx{ftz}.{type}", "b16", ("b16", c)) for c in codes]
        for code, found in ((c, f) for cs, fs in zip(codes, got) for c, f in zip(cs, fs)):
            x = float_of(flush(code, type) if ftz else code, type)
            y, z = outcome(function, x), float_of(found, type)
            if math.isnan(x):
                assert found == 0x7FFF
            elif y > top:
                assert z == math.inf or z >= top
            elif ftz and y < smallest(type):
                assert found == 0
            else:
                allowed = error[name, type] * (abs(y) if name == "ex2" else 1)
                assert abs(z - y) <= max(allowed, ulp(y, type) / 2), (x, y, z)
                assert x or found == (code if name == "tanh" else {"f16": 0x3C00, "bf16": 0x3F80}[type])


def test_gross_approximations_of_doubles() -> None:
    special = [math.inf, -math.inf, 0.0, -0.0, 5e-324, -5e-324, math.nan, 4.0] * 4
    codes = np.array(special).view(np.uint64).tolist()
    nan = 0x7FFFFFFF00000000
    inverse = [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF << 52, 0xFFF << 52, nan, 0x3FD << 52] * 4
    assert apply("rcp.approx.ftz.f64", "f64", ("f64", codes)) == inverse
    roots = [0, nan, 0x7FF << 52, 0xFFF << 52, 0x7FF << 52, 0xFFF << 52, nan, 0x3FE << 52] * 4
    assert apply("rsqrt.approx.ftz.f64", "f64", ("f64", codes)) == roots
    values = np.exp(np.random.uniform(-300, 300, 32))
    for name, function in (("rcp", lambda x: 1 / x), ("rsqrt", lambda x: 1 / math.sqrt(x))):
        got = apply(f"{name}.approx.ftz.f64", "f64", ("f64", values.view(np.uint64).tolist()))
        for x, found in zip(values.tolist(), got):
            y = float_of(found, "f64")
            assert found & 0xFFFFFFFF == 0 and abs(y / function(x) - 1) < 2**-18
    got = apply("rsqrt.approx.f64", "f64", ("f64", values.view(np.uint64).tolist()))
    assert all(abs(float_of(f, "f64") * math.sqrt(x) - 1) < 2**-50 for x, f in zip(values.tolist(), got))
