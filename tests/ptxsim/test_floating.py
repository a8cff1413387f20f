"""Floating point against rational numbers, rounded by exact.py; approximations within their bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact import (
    NAN,
    SHAPES,
    Value,
    bits,
    expected,
    flush,
    product,
    quotient,
    sample,
    size,
    smallest,
    total,
    value,
)
from lanes import apply
from machine import reg

from ptxsim.isa.rounding import rounded
from ptxsim.isa.table import Unmodelled, translate
from ptxsim.ptx.nodes import Imm, Instruction

MODES = ("rn", "rz", "rm", "rp")
Row = tuple[int, ...]


def register(type: str) -> str:
    return "b16" if type in ("f16", "bf16") else type


def check(opcode: str, types: str, exact: Callable[..., Value], rows: list[Row]) -> None:
    """The instruction's results for 32 rows of operands' bits; `types` names result and operands."""
    result, *sources = types.split()
    mode = next((m for m in MODES if f".{m}" in opcode), "rn")
    columns = list(zip(*rows))
    got = apply(opcode, register(result), *((register(t), c) for t, c in zip(sources, columns)))
    for found, row in zip(got, rows):
        if ".ftz" in opcode:
            row = tuple(flush(code, type) for code, type in zip(row, sources))
        numbers = [value(code, type) for code, type in zip(row, sources)]
        want = expected(exact(*numbers, mode), result, mode, opcode)
        shown = (opcode, [hex(x) for x in row], hex(found), want if want is None else hex(want))
        if want is None:
            assert math.isnan(value(found, result)), shown
        else:
            assert found == want, shown


def pairs(first: str, second: str) -> list[Row]:
    return list(zip(sample(first), sample(second)))


def close(type: str) -> list[Row]:
    """Numbers that nearly cancel."""
    rows = []
    for code in sample(type):
        other = (code ^ 1 << (size(type) - 1)) + random.choice((-2, -1, 0, 0, 1))
        rows.append((code, other % (1 << size(type))))
    return rows


# --- add, sub, mul ------------------------------------------------------------------------------------------

SUMS: dict[str, Callable[..., Value]] = {
    "add": lambda a, b, mode: total(a, b, mode),
    "sub": lambda a, b, mode: total(a, -b, mode),
    "mul": lambda a, b, mode: product(a, b),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("type", ["f32", "f64", "f16", "bf16"])
def test_sums_and_products(name: str, type: str) -> None:
    for mode in ("", *(f".{m}" for m in (MODES if type in ("f32", "f64") else ("rn",)))):
        flags = {"f32": ("", ".ftz", ".sat", ".ftz.sat"), "f16": ("", ".ftz", ".sat")}.get(type, ("",))
        for flag in flags:
            for rows in (pairs(type, type), close(type)):
                check(f"{name}{mode}{flag}.{type}", f"{type} {type} {type}", SUMS[name], rows)


def test_directed_rounding_leaves_the_processor_as_it_was() -> None:
    third = np.array([1.0]) / 3
    rounded("rp", np.divide, np.array([1.0]), np.array([3.0]))
    with pytest.raises(ZeroDivisionError):
        rounded("rm", lambda: 1 // 0)
    assert np.array([1.0]) / 3 == third == Fraction(1, 3).numerator / 3


def packed(opcode: str, type: str, exact: Callable[..., Value], count: int) -> None:
    """A packed form computes both halves as the single one does."""
    width, flags = size(type), opcode
    for _ in range(3):
        halves = [[sample(type) for _ in range(count)] for _ in range(2)]
        sources = [(f"b{2 * width}", [h << width | low for low, h in zip(*half)]) for half in zip(*halves)]
        got = apply(opcode, f"b{2 * width}", *sources)
        mode = next((m for m in MODES if f".{m}" in opcode), "rn")
        for part in range(2):
            for lane in range(32):
                row = [column[lane] for column in halves[part]]
                if ".ftz" in flags:
                    row = [flush(code, type) for code in row]
                want = expected(exact(*(value(code, type) for code in row), mode), type, mode, flags)
                found = got[lane] >> width * part & ((1 << width) - 1)
                assert found == want, (opcode, [hex(x) for x in row], hex(found), want)


def fused(a: Value, b: Value, c: Value, mode: str) -> Value:
    return total(product(a, b), c, mode)


@pytest.mark.parametrize("mode", ["", ".rn", ".rz", ".rm", ".rp"])
def test_pairs_of_singles(mode: str) -> None:
    for ftz in ("", ".ftz"):
        for name, function in SUMS.items():
            packed(f"{name}{mode}{ftz}.f32x2", "f32", function, 2)
        if mode:
            packed(f"fma{mode}{ftz}.f32x2", "f32", fused, 3)


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_pairs_of_halves(type: str) -> None:
    for name, function in SUMS.items():
        packed(f"{name}.rn.{type}x2", type, function, 2)
    packed(f"fma.rn.{type}x2", type, fused, 3)
    packed(f"fma.rn.relu.{type}x2", type, fused, 3)
    if type == "f16":
        packed("add.ftz.sat.f16x2", type, SUMS["add"], 2)
        packed("fma.rn.ftz.f16x2", type, fused, 3)
    packed(f"neg.{type}x2", type, lambda a, mode: -a, 1)
    packed(f"abs.{type}x2", type, lambda a, mode: abs(a), 1)


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_mixed_precision(type: str) -> None:
    for mode in ("", ".rn", ".rz", ".rm", ".rp"):
        for sat in ("", ".sat"):
            rows = pairs(type, "f32")
            check(f"add{mode}{sat}.f32.{type}", f"f32 {type} f32", SUMS["add"], rows)
            check(f"sub{mode}{sat}.f32.{type}", f"f32 {type} f32", SUMS["sub"], rows)
            if mode:
                triples = list(zip(sample(type), sample(type), sample("f32")))
                check(f"fma{mode}{sat}.f32.{type}", f"f32 {type} {type} f32", fused, triples)


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_mixed_precision_near_ties(type: str) -> None:
    """Products around half of the addend's last place."""
    for _ in range(10):
        rows = []
        for _ in range(32):
            power = (
                random.randint(-8, 8)
                if type == "f16"
                else random.choice((random.randint(-60, 60), -126, -124))
            )
            c = Fraction(2**23 + random.getrandbits(23)) * Fraction(2) ** (power - 23)
            if power < -100:
                c = Fraction(random.getrandbits(10)) * Fraction(2) ** -149
            half = Fraction(2) ** (max(power, -126) - 24)
            wide = SHAPES[type][1]
            a = half * 2**12 * (1 + random.choice((0, 0, 1, -1)) * Fraction(1, 2**wide))
            b = Fraction(1, 2**12) * (1 + random.choice((0, 0, 1, 3)) * Fraction(1, 2**wide))
            signs = [random.choice((-1, 1)) for _ in range(3)]
            codes = (bits(a * signs[0], type), bits(b * signs[1], type), bits(c * signs[2] or 0.0, "f32"))
            rows.append(tuple(code or 0 for code in codes))
        check(f"fma.rn.f32.{type}", f"f32 {type} {type} f32", fused, rows)


# --- fma ----------------------------------------------------------------------------------------------------


def near_ties(type: str = "f32") -> list[Row]:
    """c and a product that is half of c's last place, more or less a little: rounding twice goes wrong."""
    rows = []
    fraction = SHAPES[type][1]
    for _ in range(32):
        c = Fraction(2**fraction + random.getrandbits(fraction)) * random.choice((-1, 1))
        k = random.randint(fraction // 2, fraction - 1)
        a = (1 + Fraction(1, 2**k)) / 2
        b = 1 - Fraction(1, 2**k) if random.random() < 0.7 else Fraction(1)
        a *= random.choice((-1, 1))
        if random.random() < 0.4:  # beside the subnormal numbers too
            scale = Fraction(2) ** (3 - (1 << (SHAPES[type][0] - 1)) - fraction - random.randint(-2, 3))
        else:
            scale = Fraction(2) ** random.randint(-20, 20)
        exponent = random.randint(-30, 30)
        if scale < Fraction(1, 2**40):
            c = Fraction(random.getrandbits(4))
        a, b = a * scale * Fraction(2) ** exponent, b / Fraction(2) ** exponent
        codes = [bits(x or 0.0, type) for x in (a, b, c * scale)]
        rows.append(tuple(x or 0 for x in codes))
    return rows


def cancelling(type: str) -> list[Row]:
    """c is -a b, rounded, or next to it."""
    rows = []
    for a, b in pairs(type, type):
        exact = product(value(a, type), value(b, type))
        c = bits(-exact if exact else 0.0, type) or 0
        rows.append((a, b, min(c + random.choice((0, 0, 1)), (1 << size(type)) - 1)))
    return rows


@pytest.mark.parametrize("type", ["f32", "f64", "f16", "bf16"])
def test_fused(type: str) -> None:
    singles = type in ("f32", "f64")
    for mode in MODES if singles else ("rn",):
        flags = {"f32": ("", ".ftz", ".sat"), "f16": ("", ".ftz", ".sat", ".relu"), "bf16": ("", ".relu")}
        for flag in flags.get(type, ("",)):
            triples = [(*row, c) for row, c in zip(pairs(type, type), sample(type))]
            for rows in (triples, near_ties(type), cancelling(type)):
                check(f"fma.{mode}{flag}.{type}", f"{type} {type} {type} {type}", fused, rows)
                if singles:
                    check(f"mad.{mode}{flag}.{type}", f"{type} {type} {type} {type}", fused, rows)


def test_fused_to_nearest_at_length() -> None:
    """The hot path, whose shortcut has to know when it may not be taken."""
    for _ in range(25):
        check("fma.rn.f32", "f32 f32 f32 f32", fused, near_ties())
        # one lane that needs care among lanes that do not
        rows = [tuple(int(x) for x in np.random.rand(3).astype("f4").view("u4")) for _ in range(31)]
        rows.append(random.choice(near_ties() + cancelling("f32")))
        check("fma.rn.f32", "f32 f32 f32 f32", fused, rows)


def test_fused_with_a_literal() -> None:
    a, b = sample("f32"), sample("f32")
    got = apply("fma.rn.f32", "f32", ("f32", a), ("f32", b), Imm(0.5))
    want = [
        expected(fused(value(x, "f32"), value(y, "f32"), Fraction(1, 2), "rn"), "f32", "rn")
        for x, y in zip(a, b)
    ]
    assert got == want


# --- division, roots ----------------------------------------------------------------------------------------


def root(a: Value, type: str, mode: str) -> int | None:
    """Bits of the square root, by its definition: the exact root lies between two numbers' squares."""
    if isinstance(a, float):
        return bits(a if a == 0 or a > 0 else math.nan, type, mode)
    if a < 0:
        return None
    scaled = a * Fraction(4) ** 700
    near = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(near) ** 2 == scaled
    return bits((Fraction(near) + (0 if exact else Fraction(1, 2))) / Fraction(2) ** 700, type, mode)


@pytest.mark.parametrize("type", ["f32", "f64"])
def test_quotients_and_roots(type: str) -> None:
    for mode in MODES:
        for ftz in ("", ".ftz") if type == "f32" else ("",):
            for _ in range(2):
                check(
                    f"div.{mode}{ftz}.{type}",
                    f"{type} {type} {type}",
                    lambda a, b, mode: quotient(a, b),
                    pairs(type, type),
                )
            one = [(code,) for code in sample(type)]
            check(f"rcp.{mode}{ftz}.{type}", f"{type} {type}", lambda a, mode: quotient(Fraction(1), a), one)
        codes = sample(type)
        for code, found in zip(codes, apply(f"sqrt.{mode}.{type}", type, (type, codes))):
            want = root(value(code, type), type, mode)
            assert found == want if want is not None else math.isnan(value(found, type)), (mode, hex(code))


# --- signs, properties, extremes ----------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["f32", "f64", "f16", "bf16"])
def test_signs(type: str) -> None:
    for ftz in ("", ".ftz") if type in ("f32", "f16") else ("",):
        rows = [(code,) for code in sample(type)]
        check(f"neg{ftz}.{type}", f"{type} {type}", lambda a, mode: -a, rows)
        check(f"abs{ftz}.{type}", f"{type} {type}", lambda a, mode: abs(a), rows)
    if type in ("f32", "f64"):
        a, b = sample(type), sample(type)
        sign = 1 << (size(type) - 1)
        want = [x & sign | y & ~sign for x, y in zip(a, b)]
        assert apply(f"copysign.{type}", type, (type, a), (type, b)) == want


PROPERTIES: dict[str, Callable[[Any, str], bool]] = {
    "finite": lambda a, type: math.isfinite(a),
    "infinite": lambda a, type: isinstance(a, float) and math.isinf(a),
    "number": lambda a, type: a == a,
    "notanumber": lambda a, type: a != a,
    "normal": lambda a, type: math.isfinite(a) and (a == 0 or abs(a) >= smallest(type)),
    "subnormal": lambda a, type: math.isfinite(a) and 0 < abs(a) < smallest(type),
}


@pytest.mark.parametrize("type", ["f32", "f64"])
def test_properties(type: str) -> None:
    codes = sample(type)
    for name, function in PROPERTIES.items():
        want = [function(value(code, type), type) for code in codes]
        assert apply(f"testp.{name}.{type}", "pred", (type, codes)) == want


def extreme(name: str, flags: str, *codes: int, type: str) -> int | None:
    """PTX ISA 9.7.3.11, on bits. None for NaN."""
    sign = 1 << (size(type) - 1)

    def key(code: int) -> tuple[float | Fraction, bool]:
        return value(code, type), not code & sign  # -0 < +0

    def two(x: int | None, y: int | None) -> int | None:
        lost = [c for c in (x, y) if c is None or math.isnan(value(c, type))]
        if lost:
            kept = [c for c in (x, y) if c is not None and c not in lost]
            return kept[0] if kept and "NaN" not in flags else None
        return (max if name == "max" else min)((x, y), key=key)  # type: ignore[type-var, arg-type]

    magnitudes = [c & ~sign if "abs" in flags else c for c in codes]
    result = two(magnitudes[0], magnitudes[1])
    if len(codes) == 3:
        result = two(result, magnitudes[2])
    if result is not None and "xorsign" in flags:
        result = result & ~sign | (codes[0] ^ codes[1]) & sign
    return result


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("type", ["f32", "f64", "f16", "bf16"])
def test_extremes(name: str, type: str) -> None:
    flags = [""] if type == "f64" else ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"]
    flags += [".ftz", ".ftz.NaN"] if type in ("f32", "f16") else []
    three = ["", ".NaN", ".abs", ".ftz.NaN.abs"] if type == "f32" else []
    cases = [(flag, 2) for flag in flags] + [(flag, 3) for flag in three]
    for flag, count in cases * 2:
        columns = [sample(type) for _ in range(count)]
        for lane in range(0, 32, 5):  # zeros of both signs
            for column in columns:
                column[lane] = random.getrandbits(1) << (size(type) - 1)
        got = apply(f"{name}{flag}.{type}", register(type), *((register(type), c) for c in columns))
        for found, row in zip(got, zip(*columns)):
            codes = [flush(c, type) for c in row] if "ftz" in flag else list(row)
            want = extreme(name, flag, *codes, type=type)
            if want is None:
                assert found == NAN[type] if type in NAN else math.isnan(value(found, type))
            else:
                assert found == want, (name, flag, type, [hex(c) for c in row])


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_extremes_of_pairs(type: str) -> None:
    a, b = ([high << 16 | low for low, high in zip(sample(type), sample(type))] for _ in range(2))
    for flag in ("", ".NaN", ".xorsign.abs"):
        got = apply(f"max{flag}.{type}x2", "b32", ("b32", a), ("b32", b))
        for found, x, y in zip(got, a, b):
            for shift in (0, 16):
                want = extreme("max", flag, x >> shift & 0xFFFF, y >> shift & 0xFFFF, type=type)
                assert found >> shift & 0xFFFF == (NAN[type] if want is None else want)


def test_what_is_not_known_is_refused() -> None:
    f, d, h, p = reg("f32", 1), reg("b64", 1), reg("b16", 1), reg("pred", 1)
    for opcode, operands in (
        ("fma.f32", (f, f, f, f)),
        ("mad.f32", (f, f, f, f)),
        ("mul.f32.bf16", (f, h, f)),
        ("add.rn.rz.f32", (f, f, f)),
        ("mul.sat.f32x2", (d, d, d)),
        ("min.f32x2", (d, d, d)),
        ("add.rz.f16", (h, h, h)),
        ("add.sat.bf16", (h, h, h)),
        ("fma.rn.oob.f16", (h, h, h, h)),
        ("fma.rn.ftz.f32.bf16", (f, h, h, f)),
        ("min.abs.f32", (f, f, f)),
        ("min.xorsign.abs.f32", (f, f, f, f)),
        ("min.f16", (h, h, h, h)),
        ("div.f32", (f, f, f)),
        ("ex2.f32", (f, f)),
        ("ex2.approx.bf16", (h, h)),
        ("ex2.approx.ftz.f16", (h, h)),
        ("tanh.approx.ftz.f32", (f, f)),
        ("rcp.approx.f64", (d, d)),
        ("sqrt.full.f32", (f, f)),
        ("testp.f32", (p, f)),
        ("add.ftz.f64", (d, d, d)),
        ("add.f32", (f, f, d)),
    ):
        with pytest.raises(Unmodelled):
            translate(Instruction(opcode, operands, 1))
