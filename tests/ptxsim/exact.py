"""Floating point in rational numbers: what a format's bits mean, and how IEEE 754 rounds to it.

Nothing here knows the simulator. A value is a Fraction, or a float where it is a zero, an infinity or NaN.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

SHAPES = {"f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10), "f32": (8, 23), "f64": (11, 52)}
SHAPES |= {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}
"""Exponent and fraction bits."""
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "e4m3": 0x7F, "e5m2": 0x7F}
TOP = {"e4m3": 0x7E, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}
"""The largest number, for formats without infinity."""
Value = Fraction | float


def size(type: str) -> int:
    return 1 + sum(SHAPES[type])


def value(bits: int, type: str) -> Value:
    exponent_bits, fraction_bits = SHAPES[type]
    sign = -1 if bits >> (exponent_bits + fraction_bits) & 1 else 1
    field, fraction = bits >> fraction_bits & ((1 << exponent_bits) - 1), bits & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if type not in TOP and field == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if type == "e4m3" and bits & 0x7F == 0x7F:
        return math.nan
    if not field and not fraction:
        return sign * 0.0
    whole = fraction + (field > 0) * (1 << fraction_bits)
    return sign * Fraction(whole) * Fraction(2) ** (max(field, 1) - bias - fraction_bits)


def largest(type: str) -> int:
    exponent_bits, fraction_bits = SHAPES[type]
    return TOP.get(type, (((1 << exponent_bits) - 1) << fraction_bits) - 1)


def bits(exact: Value, type: str, mode: str = "rn", finite: bool = False) -> int | None:
    """The code that a value rounds to; None for NaN, whose bits are nobody's promise."""
    exponent_bits, fraction_bits = SHAPES[type]
    sign_bit = 1 << (exponent_bits + fraction_bits)
    top = largest(type)
    if isinstance(exact, float):
        if math.isnan(exact):
            return None
        negative = math.copysign(1, exact) < 0
        code = 0 if exact == 0 else top if finite or type in TOP else top + 1
        return code | sign_bit * negative
    negative, magnitude = exact < 0, abs(exact)
    low = 2 - (1 << (exponent_bits - 1))
    exponent = max(math.floor(math.log2(magnitude)) if 1e-300 < magnitude < 1e300 else _log(magnitude), low)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    while exponent > low and Fraction(2) ** exponent > magnitude:
        exponent -= 1
    steps = magnitude / Fraction(2) ** (exponent - fraction_bits)
    down = steps.numerator // steps.denominator
    rest = steps - down
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": rest > 0 and negative,
        "rp": rest > 0 and not negative,
    }[mode]
    code = down + up + ((exponent - low) << fraction_bits)
    if code > top:
        outwards = mode in ("rn", "rna") or (mode == "rm" and negative) or (mode == "rp" and not negative)
        code = top + 1 if outwards and not finite and type not in TOP else top
    return code | sign_bit * negative


def _log(magnitude: Fraction) -> int:
    return magnitude.numerator.bit_length() - magnitude.denominator.bit_length()


def expected(exact: Value, type: str, mode: str, flags: str = "") -> int | None:
    """The result's bits, and None where any NaN will do (fp64 keeps payloads)."""
    if "sat" in flags and isinstance(exact, float) and math.isnan(exact):
        return 0
    if "relu" in flags and exact <= 0:
        exact = 0.0
    if "sat" in flags:
        exact = 0.0 if exact <= 0 else Fraction(1) if exact > 1 else exact
    code = bits(exact, type, mode)
    if code is None:
        return NAN.get(type)
    if "ftz" in flags and abs(value(code, type)) < smallest(type):
        return code & 1 << (size(type) - 1)
    return code


def smallest(type: str) -> Fraction:
    """The smallest normal number."""
    return Fraction(2) ** (2 - (1 << (SHAPES[type][0] - 1)))


def flush(code: int, type: str) -> int:
    return code & 1 << (size(type) - 1) if abs(value(code, type)) < smallest(type) else code


def product(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return _float(a) * _float(b)


def total(a: Value, b: Value, mode: str = "rn") -> Value:
    """a + b, with the sign that IEEE 754 gives a sum of zero."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b or (-0.0 if mode == "rm" else 0.0)
    if a == 0 and b == 0:
        same = math.copysign(1, a) == math.copysign(1, b)
        return float(a) if same else (-0.0 if mode == "rm" else 0.0)
    if a == 0 and isinstance(b, Fraction):
        return b
    if b == 0 and isinstance(a, Fraction):
        return a
    return _float(a) + _float(b)


def quotient(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    if b == 0:
        if a == 0 or math.isnan(_float(a)):
            return math.nan
        return math.copysign(math.inf, _float(a)) * math.copysign(1, _float(b))
    return _float(a) / _float(b)


def _float(x: Value) -> float:
    """For special cases: any finite number stands for its sign."""
    return x if isinstance(x, float) else 1.0 if x > 0 else -1.0


def sample(type: str, count: int = 32) -> list[int]:
    """Bits of all kinds: zeros, subnormals, extremes, infinities, NaNs, short and long fractions."""
    exponent_bits, fraction_bits = SHAPES[type]
    top = largest(type)
    corners = [0, 1, 2, top, top - 1, 1 << fraction_bits, (1 << fraction_bits) - 1, (1 << fraction_bits) + 1]
    corners += [((1 << (exponent_bits - 1)) - 1) << fraction_bits]
    if type not in TOP:
        corners += [top + 1, top + 2, (1 << (size(type) - 1)) - 1]
    result = []
    for _ in range(count):
        kind = random.random()
        if kind < 0.3:
            code = random.choice(corners)
        elif kind < 0.4:
            code = random.getrandbits(fraction_bits)
        elif kind < 0.7:  # of middling size, so that sums meet
            field = (1 << (exponent_bits - 1)) - 1 + random.randint(-3, 3)
            field = min(max(field, 0), (1 << exponent_bits) - 2)
            fraction = random.getrandbits(fraction_bits)
            if random.random() < 0.3:
                fraction &= ~((1 << random.randint(0, fraction_bits)) - 1)
            code = field << fraction_bits | fraction
        else:
            code = random.getrandbits(size(type) - 1)
        result.append(code | random.getrandbits(1) << (size(type) - 1))
    return result
