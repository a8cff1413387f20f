"""cvt against rational numbers and Python integers."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import NAN, TOP, Value, bits, largest, sample, size, value
from lanes import apply, as_type, words
from machine import reg

from ptxsim.isa.table import Unmodelled, translate
from ptxsim.ptx.nodes import Instruction

INTEGERS = [f"{kind}{width}" for kind in "us" for width in (8, 16, 32, 64)]
FLOATS = ["f16", "bf16", "f32", "f64"]
MODES = ("rn", "rz", "rm", "rp")


def width(type: str) -> int:
    return int(type[1:])


def register(type: str) -> str:
    return "b16" if type in ("f16", "bf16") else type


def limits(type: str) -> tuple[int, int]:
    n = width(type)
    return (-(1 << n - 1), (1 << n - 1) - 1) if type[0] == "s" else (0, (1 << n) - 1)


def extended(number: int, type: str, file: int) -> int:
    """A number in a register at least as wide as its type."""
    return as_type(number, type) % (1 << file)


# --- integers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("of", INTEGERS)
def test_integers(to: str, of: str) -> None:
    for wider in (False, True):
        source = max(width(of), 16) if not wider else 64
        result = max(width(to), 16) if not wider else 64
        codes = words(source, *(x % (1 << source) for x in limits(to)))
        got = apply(f"cvt.{to}.{of}", f"b{result}", (f"b{source}", codes))
        numbers = [as_type(code, of) for code in codes]
        assert got == [extended(x, to, result) for x in numbers]
        low, high = limits(to)
        if limits(of)[0] < low or limits(of)[1] > high:
            got = apply(f"cvt.sat.{to}.{of}", f"b{result}", (f"b{source}", codes))
            assert got == [extended(min(max(x, low), high), to, result) for x in numbers]
        else:
            with pytest.raises(Unmodelled):
                translate(Instruction(f"cvt.sat.{to}.{of}", (reg(f"b{result}", 1), reg(f"b{source}", 2)), 1))


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("of", INTEGERS)
def test_integers_to_floats(to: str, of: str) -> None:
    for mode in MODES:
        codes = words(max(width(of), 16))
        if width(of) == 64:  # halfway between numbers, or nearly
            for lane in range(0, 32, 2):
                shift = 62 - random.randint(0, 8)
                middle = 1 << shift - {"f32": 24, "f64": 53, "f16": 11, "bf16": 8}[to]
                codes[lane] = 1 << shift | middle * random.choice((1, 3)) + random.choice((-1, 0, 1))
        numbers = [as_type(code, of) for code in codes]
        got = apply(f"cvt.{mode}.{to}.{of}", register(to), (f"b{max(width(of), 16)}", codes))
        want = [bits(Fraction(x) if x else 0.0, to, mode) for x in numbers]
        assert got == want, (mode, numbers)


ROUND = {
    "rni": lambda x: round(x),
    "rzi": lambda x: math.trunc(x),
    "rmi": lambda x: math.floor(x),
    "rpi": lambda x: math.ceil(x),
}


def near_integers(type: str) -> list[int]:
    """Codes of numbers near small integers, halves and the ends of integer types."""
    codes = []
    for _ in range(32):
        whole = random.choice([0, 1, 2, 3, 127, 128, 255, 32767, 65535, 2**31, 2**32, 2**63, 2**64])
        number = Fraction(whole) * random.choice((-1, 1)) + Fraction(
            random.randint(-4, 4), random.choice((2, 4))
        )
        codes.append(bits(number or 0.0, type, random.choice(MODES)) or 0)
    return codes


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("of", FLOATS)
def test_floats_to_integers(to: str, of: str) -> None:
    low, high = limits(to)
    for mode, function in ROUND.items():
        for flag in ("", ".sat", *((".ftz",) if of == "f32" else ())):
            result = max(width(to), 16)
            codes = near_integers(of)[:16] + sample(of, 16)
            got = apply(f"cvt.{mode}{flag}.{to}.{of}", f"b{result}", (register(of), codes))
            for code, found in zip(codes, got):
                x = value(code, of)
                if flag == ".ftz" and abs(x) < Fraction(1, 2**126):
                    x = 0.0
                if isinstance(x, float) and math.isnan(x):
                    number = 1 << width(to) - 1 if of == "f64" or width(to) == 64 else 0
                elif isinstance(x, float) and math.isinf(x):
                    number = high if x > 0 else low
                else:
                    number = min(max(function(x), low), high)
                assert found == extended(number, to, result), (mode, flag, hex(code), number)


# --- floating point -----------------------------------------------------------------------------------------


def converted(x: Value, to: str, mode: str, flags: str) -> int | None:
    """Bits, by the ISA's words; None for a NaN of fp64."""
    if "sat." in flags:
        if x != x or x <= 0:
            return 0
        x = min(x, Fraction(1))
    if "relu" in flags and x <= 0:
        x = 0.0
    code = bits(x, to, mode, finite="satfinite" in flags)
    return NAN.get(to, {"tf32": 0x7FFFFFFF >> 13}.get(to)) if code is None else code


def conversion(opcode: str, to: str, of: str, mode: str) -> None:
    codes = sample(of)
    if size(of) > size(to):  # halfway between the narrow numbers, or nearly
        for lane, code in enumerate(sample(to, 16)):
            x, y = value(code, to), value(min(code + 1, (1 << size(to)) - 1), to)
            if isinstance(x, Fraction) and isinstance(y, Fraction):
                codes[lane] = (bits((x + y) / 2, of) or 0) + random.choice((-1, 0, 0, 1))
    result = "b32" if to == "tf32" else register(to)
    got = apply(opcode, result, (register(of), codes))
    for code, found in zip(codes, got):
        x = value(code, of)
        if ".ftz" in opcode and of == "f32" and abs(x) < Fraction(1, 2**126):
            x = math.copysign(0.0, -1 if code >> 31 else 1)
        want = converted(x, to, mode, opcode)
        if want is None:
            assert math.isnan(value(found, to)), (opcode, hex(code))
            continue
        if ".ftz" in opcode and to == "f32" and abs(value(want, to)) < Fraction(1, 2**126):
            want &= 0x80000000
        if to == "tf32":
            cut = code & ~0x1FFF if opcode == "cvt.rna.tf32.f32" else 0x7FFFFFFF  # as Hopper does
            want = cut if x != x else (want & 0x3FFFF) << 13 | (want >> 18) << 31
        assert found == want, (opcode, hex(code), hex(found), hex(want))


NARROWING = [
    ("f32", "f64"),
    ("f16", "f64"),
    ("bf16", "f64"),
    ("f16", "f32"),
    ("bf16", "f32"),
    ("bf16", "f16"),
]
NARROWING += [("f16", "bf16")]


@pytest.mark.parametrize("to, of", NARROWING)
def test_narrower_floats(to: str, of: str) -> None:
    for mode in MODES:
        for _ in range(3):
            conversion(f"cvt.{mode}.{to}.{of}", to, of, mode)
            if to in ("f32", "f16"):
                conversion(f"cvt.{mode}.sat.{to}.{of}", to, of, mode)
            if "f32" in (to, of):
                conversion(f"cvt.{mode}.ftz.{to}.{of}", to, of, mode)
        if of == "f32" and mode in ("rn", "rz"):
            for flags in (".relu", ".satfinite", ".relu.satfinite"):
                conversion(f"cvt.{mode}{flags}.{to}.{of}", to, of, mode)


def test_wider_floats() -> None:
    for to, of in (
        ("f64", "f32"),
        ("f64", "f16"),
        ("f64", "bf16"),
        ("f32", "f16"),
        ("f32", "bf16"),
        ("f32", "f32"),
    ):
        conversion(f"cvt.{to}.{of}", to, of, "rn")
        conversion(f"cvt.sat.{to}.{of}", to, of, "rn")
        if "f32" in (to, of):
            conversion(f"cvt.ftz.{to}.{of}", to, of, "rn")
    conversion("cvt.rn.f32.bf16", "f32", "bf16", "rn")


def test_tf32() -> None:
    for mode, flags in (
        ("rna", ""),
        ("rna", ".satfinite"),
        ("rn", ""),
        ("rn", ".relu"),
        ("rz", ""),
        ("rz", ".satfinite.relu"),
    ):
        for _ in range(3):
            conversion(f"cvt.{mode}{flags}.tf32.f32", "tf32", "f32", mode)


@pytest.mark.parametrize("type", FLOATS)
def test_floats_to_whole_numbers(type: str) -> None:
    for mode, function in ROUND.items():
        codes = near_integers(type)[:16] + sample(type, 16)
        for code, found in zip(
            codes, apply(f"cvt.{mode}.{type}.{type}", register(type), (register(type), codes))
        ):
            x = value(code, type)
            if isinstance(x, Fraction):
                sign = -0.0 if x < 0 else 0.0
                assert found == bits(Fraction(function(x)) or sign, type), (mode, hex(code))
            elif x == x:
                assert found == code
            else:
                assert math.isnan(value(found, type)) and found == NAN.get(type, found)
    tiny = [0x80000001, 0x00000001] * 16
    assert apply("cvt.rmi.f32.f32", "f32", ("f32", tiny)) == [0xBF800000, 0] * 16
    assert apply("cvt.rmi.ftz.f32.f32", "f32", ("f32", tiny)) == [0x80000000, 0] * 16


# --- pairs --------------------------------------------------------------------------------------------------


def near_ties(to: str, of: str) -> list[int]:
    codes = sample(of)
    for lane, code in enumerate(sample(to, 20)):
        x = value(code, to)
        y = value(code + 1, to) if code & ~(1 << (size(to) - 1)) < largest(to) else x
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            codes[lane] = (bits((x + y) / 2, of) or 0) + random.choice((-1, 0, 0, 1))
    return codes


def without_nan(codes: list[int], really: bool) -> list[int]:
    return [c if not really or value(c, "f32") == value(c, "f32") else c & 0xFF800000 for c in codes]


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_two_singles_to_a_pair_of_halves(to: str) -> None:
    for mode, flags in (
        ("rn", ""),
        ("rz", ""),
        ("rn", ".relu"),
        ("rn", ".satfinite"),
        ("rz", ".relu.satfinite"),
    ):
        for quiet in ("", "a", "b", "ab"):
            a, b = (without_nan(near_ties(to, "f32"), x in quiet) for x in "ab")
            opcode = f"cvt.{mode}{flags}.{to}x2.f32"
            got = apply(opcode, "b32", ("f32", a), ("f32", b))
            want = [
                (converted(value(x, "f32"), to, mode, opcode) or 0) << 16
                | (converted(value(y, "f32"), to, mode, opcode) or 0)
                for x, y in zip(a, b)
            ]
            assert got == want, opcode


def test_pairs_agree_with_torch() -> None:
    a, b = (np.random.standard_normal(32).astype(np.float32) for _ in range(2))
    codes = [x.view(np.uint32).tolist() for x in (a, b)]
    for to, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        high, low = (torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16) for x in (a, b))
        want = (high.astype(np.uint32) << 16 | low).tolist()
        assert apply(f"cvt.rn.{to}x2.f32", "b32", ("f32", codes[0]), ("f32", codes[1])) == want


SMALL = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def small(x: Value, to: str, flags: str) -> int:
    """.satfinite: NaN becomes the largest number where the format has none."""
    code = converted(x, to, "rn", flags)
    return TOP[to] if code is None else code


@pytest.mark.parametrize("to", SMALL)
def test_to_pairs_of_small_floats(to: str) -> None:
    shift = 4 if to == "e2m1" else 8
    for relu in ("", ".relu"):
        opcode = f"cvt.rn.satfinite{relu}.{to}x2."
        for _ in range(3):
            a, b = near_ties(to, "f32"), near_ties(to, "f32")
            got = apply(opcode + "f32", "b16", ("f32", a), ("f32", b))
            want = [
                small(value(x, "f32"), to, opcode) << shift | small(value(y, "f32"), to, opcode)
                for x, y in zip(a, b)
            ]
            assert got == want
            for half in ("f16", "bf16"):
                low, high = near_ties(to, half), near_ties(to, half)
                got = apply(f"{opcode}{half}x2", "b16", ("b32", [y << 16 | x for x, y in zip(low, high)]))
                want = [
                    small(value(y, half), to, opcode) << shift | small(value(x, half), to, opcode)
                    for x, y in zip(low, high)
                ]
                assert got == want


@pytest.mark.parametrize("of", SMALL)
def test_from_pairs_of_small_floats(of: str) -> None:
    shift, count = (4, 16) if of == "e2m1" else (8, 1 << size(of))
    codes = [(random.randrange(count), lane % count) for lane in range(256)]
    for to in ("f16", "bf16"):
        for relu in ("", ".relu"):
            for start in range(0, 256, 32):
                part = codes[start : start + 32]
                got = apply(
                    f"cvt.rn{relu}.{to}x2.{of}x2", "b32", ("b16", [high << shift | low for high, low in part])
                )
                want = [
                    (converted(value(high, of), to, "rn", relu) or 0) << 16
                    | (converted(value(low, of), to, "rn", relu) or 0)
                    for high, low in part
                ]
                assert got == want


def scale(x: Value, mode: str, finite: bool) -> int:
    """ue8m0: the power of two below or above a magnitude."""
    if x != x:
        return 0xFF
    if isinstance(x, float):
        return 0 if x == 0 else 0xFE if finite else 0xFF
    power = -127
    while power < 128 and Fraction(2) ** (power + 1) <= abs(x):
        power += 1
    if mode == "rp" and Fraction(2) ** power < abs(x):
        power += 1
    return min(power + 127, 0xFE if finite else 0xFF)


def test_scales() -> None:
    for mode in ("rz", "rp"):
        for flag in ("", ".satfinite"):
            a, b = sample("f32"), sample("f32")
            got = apply(f"cvt.{mode}{flag}.ue8m0x2.f32", "b16", ("f32", a), ("f32", b))
            want = [
                scale(value(x, "f32"), mode, bool(flag)) << 8 | scale(value(y, "f32"), mode, bool(flag))
                for x, y in zip(a, b)
            ]
            assert got == want
            a, b = sample("bf16"), sample("bf16")
            got = apply(
                f"cvt.{mode}{flag}.ue8m0x2.bf16x2", "b16", ("b32", [x << 16 | y for x, y in zip(a, b)])
            )
            want = [
                scale(value(x, "bf16"), mode, bool(flag)) << 8 | scale(value(y, "bf16"), mode, bool(flag))
                for x, y in zip(a, b)
            ]
            assert got == want
    codes = [0, 1, 127, 128, 253, 254, 255, random.randrange(255)] * 4
    got = apply("cvt.rn.bf16x2.ue8m0x2", "b32", ("b16", [127 << 8 | c for c in codes]))
    want = [0x3F800000 | (0x7FFF if c == 255 else bits(Fraction(2) ** (c - 127), "bf16") or 0) for c in codes]
    assert got == want


@pytest.mark.parametrize("kind", [f"{sign}{n}" for sign in "us" for n in (2, 4, 8, 16)])
def test_integers_packed(kind: str) -> None:
    n = width(kind)
    low, high = limits(kind)
    a, b, c = (words(32, *(x % 2**32 for x in (low, high, low - 1, high + 1))) for _ in range(3))
    upper, lower = ([min(max(as_type(x, "s32"), low), high) % (1 << n) for x in column] for column in (a, b))
    want = [x << n | y for x, y in zip(upper, lower)]
    if n == 16:
        assert apply(f"cvt.pack.sat.{kind}.s32", "u32", ("s32", a), ("s32", b)) == want
    else:
        got = apply(f"cvt.pack.sat.{kind}.s32.b32", "u32", ("s32", a), ("s32", b), ("b32", c))
        assert got == [(x | z << 2 * n) % 2**32 for x, z in zip(want, c)]


def test_what_is_not_known_is_refused() -> None:
    r, d, h = reg("b32", 1), reg("b64", 1), reg("b16", 1)
    for opcode, operands in (
        ("cvt.f32.s32", (r, r)),
        ("cvt.s32.f32", (r, r)),
        ("cvt.rn.s32.s64", (r, d)),
        ("cvt.rn.f64.f32", (d, r)),
        ("cvt.f32.f64", (r, d)),
        ("cvt.rn.f32.f32", (r, r)),
        ("cvt.rna.bf16.f32", (h, r)),
        ("cvt.rm.relu.f16.f32", (h, r)),
        ("cvt.f16.bf16", (h, h)),
        ("cvt.rm.f16x2.f32", (r, r, r)),
        ("cvt.rs.f16x2.f32", (r, r, r, r)),
        ("cvt.rn.e4m3x2.f32", (h, r, r)),
        ("cvt.rn.satfinite.ue8m0x2.f32", (h, r, r)),
        ("cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.e4m3x2", (r, h, h)),
        ("cvt.rn.s2f6x2.f32", (h, r, r)),
        ("cvt.rn.satfinite.scaled::n2::ue8m0.s2f6x2.f32", (h, r, r, h)),
        ("cvt.rz.bf16x2.s2f6x2", (r, h)),
        ("cvt.ftz.s32.f64", (r, d)),
        ("cvt.u64.u32", (r, r)),
        ("cvt.u64.u64", (r, d)),
        ("cvt.rn.bf16.f32", (r, r)),
        ("cvt.rzi.rmi.s32.f32", (r, r)),
        ("cvt.pack.sat.u8.s32", (r, r, r)),
    ):
        with pytest.raises(Unmodelled):
            translate(Instruction(opcode, operands, 1))


# --- fixed point --------------------------------------------------------------------------------------------


def fixed(code: int) -> Fraction:
    """A number of 8 bits, 6 of them below the point."""
    return Fraction(code - 256 if code >= 128 else code, 64)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fixed_point_to_bf16(scaled: bool, relu: str) -> None:
    """Every code: two in each lane, each with a power of two of its own."""
    for start in range(0, 256, 64):
        pairs = [start + 2 * i | (start + 2 * i + 1) << 8 for i in range(32)]
        scales = [random.randrange(60, 190) | random.randrange(60, 190) << 8 for _ in range(32)]
        sources = [("b16", pairs), *([("b16", scales)] if scaled else [])]
        opcode = f"cvt.rn.satfinite{relu}{'.scaled::n2::ue8m0' if scaled else ''}.bf16x2.s2f6x2"
        for pair, scale, found in zip(pairs, scales, apply(opcode, "b32", *sources)):
            for at in (0, 8):
                power = Fraction(2) ** ((scale >> at & 255) - 127) if scaled else Fraction(1)
                want = fixed(pair >> at & 255) * power
                if relu:
                    want = max(want, Fraction(0))
                assert value(found >> 2 * at & 0xFFFF, "bf16") == want


@pytest.mark.parametrize("relu", ["", ".relu"])
def test_fixed_point_of_fp32(relu: str) -> None:
    numbers = [
        random.choice((-1, 1)) * random.choice((random.uniform(0, 3), random.randrange(300) / 128))
        for _ in range(62)
    ]
    numbers += [1e30, -1e30]
    high, low = (np.array(part, np.float32) for part in (numbers[:32], numbers[32:]))
    found = apply(
        f"cvt.rn{relu}.satfinite.s2f6x2.f32",
        "b16",
        ("f32", high.view(np.uint32)),
        ("f32", low.view(np.uint32)),
    )
    for code, upper, lower in zip(found, high.tolist(), low.tolist()):
        for part, given in ((code >> 8, upper), (code & 255, lower)):
            nearest = round(Fraction(max(given, 0.0) if relu else given) * 64)
            assert part == min(max(nearest, -128), 127) % 256
