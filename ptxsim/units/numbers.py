"""Number formats of tensor cores: raw bits to float32, exactly, and back, rounded to nearest even.

PTX ISA "Alternate Floating-Point Data Formats" and "cvt". Raw arrays are uint8, uint16 or
uint32; the formats of 4 and 6 bits lie one to a byte, in its low bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import unmodelled

Raw = NDArray[Any]
"""uint8, uint16 or uint32: the bits of numbers."""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Small:
    """A float of at most 8 bits: sign, `exponent` and `mantissa` bits; the bias is 2**(exponent - 1) - 1.

    `largest` is the code of the largest finite number, `nan` the code of the canonical NaN and `infinity`
    that of infinity; None where the format has none.
    """

    exponent: int
    mantissa: int
    largest: int
    nan: int | None = None
    infinity: int | None = None

    @property
    def lowest_exponent(self) -> int:
        """Lowest exponent of normal numbers; subnormal ones have the same quantum."""
        return 2 - (1 << (self.exponent - 1))

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)


SMALL = {
    "e4m3": Small(4, 3, largest=0x7E, nan=0x7F),
    "e5m2": Small(5, 2, largest=0x7B, nan=0x7F, infinity=0x7C),
    "e2m3": Small(2, 3, largest=0x1F),
    "e3m2": Small(3, 2, largest=0x1F),
    "e2m1": Small(2, 1, largest=0x07),
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s8": 8, "u8": 8, "s32": 32}
BITS |= dict.fromkeys((*SMALL, "ue8m0", "ue4m3"), 8)
"""Bits that an element takes in memory, by the type's PTX name."""


def raw_dtype(type: str) -> np.dtype[Any]:
    """The unsigned dtype that holds the type's bits. Raises UnsupportedError for a type that is not in
    BITS."""
    if type not in BITS:
        raise unmodelled(f"elements of type {type}", ", ".join(BITS))
    return np.dtype(f"u{BITS[type] // 8}")


def decode(type: str, raw: Raw) -> Floats:
    """The numbers, exactly; float32 in the shape of `raw`, which has the dtype raw_dtype(type) (or is
    signed).

    tf32 is read as tensor cores read it: the low 13 bits do not count.
    """
    match type:
        case "bf16":
            return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
        case "f16":
            return raw.view(np.float16).astype(np.float32)
        case "f32":
            return raw.view(np.float32)
        case "tf32":
            return (raw & np.uint32(0xFFFFE000)).view(np.float32)
        case "s8" | "u8":
            return raw.view(np.int8 if type == "s8" else np.uint8).astype(np.float32)
        case "ue8m0":
            return _POWERS.take(raw)
        case "ue4m3":
            return _values("e4m3").take(raw & np.uint8(0x7F))
    if type not in SMALL:
        raise unmodelled(
            f"elements of type {type} as float32", "f16, bf16, f32, tf32, s8, u8, " + ", ".join(SMALL)
        )
    return _values(type).take(raw)


_POWERS = np.append(np.ldexp(np.float64(1), np.arange(-127, 128)), np.nan).astype(np.float32)
"""Value of each ue8m0 code."""


@cache
def _values(type: str) -> Floats:
    """Value of each byte, float32 [256]; bits above the format's do not count."""
    small = SMALL[type]
    codes = np.arange(256)
    magnitude = codes & (small.sign - 1)
    exponent, fraction = magnitude >> small.mantissa, magnitude & ((1 << small.mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << small.mantissa), fraction)
    quantum = np.maximum(exponent, 1) - 1 + small.lowest_exponent - small.mantissa
    values = np.ldexp(significand.astype(np.float64), quantum)
    values[magnitude > small.largest] = np.nan
    if small.infinity is not None:
        values[magnitude == small.infinity] = np.inf
    table = np.where(codes & small.sign, -values, values).astype(np.float32)
    table.flags.writeable = False
    return table


def encode(type: str, values: Floats, saturate: bool = False) -> Raw:
    """The nearest numbers of the type, ties to even, as raw bits of dtype raw_dtype(type), in the shape of
    `values` (float32).

    With `saturate` (.satfinite) what is too large becomes the largest finite number; else infinity, or NaN
    in e4m3. NaN becomes the canonical NaN, in e2m3, e3m2 and e2m1 (which always saturate) the largest
    positive number.
    """
    match type:
        case "f32":
            return values.view(np.uint32)
        case "bf16":
            return _encode_bf16(values, saturate)
        case "f16":
            return _encode_f16(values, saturate)
        case "tf32":
            return _encode_tf32(values, saturate)
    if type not in SMALL:
        raise unmodelled(f"rounding to {type}", "f16, bf16, f32, tf32, " + ", ".join(SMALL))
    return _encode_small(SMALL[type], values, saturate)


def _encode_bf16(values: Floats, saturate: bool) -> Raw:
    bits = values.view(np.uint32)
    rounded = ((bits + ((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    if saturate:
        rounded = np.where(rounded & 0x7FFF == 0x7F80, rounded - np.uint16(1), rounded)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _encode_tf32(values: Floats, saturate: bool) -> Raw:
    """The low 13 bits are zero; NaN is 0x7FFFE000, as TMA gives it on an H100."""
    bits = values.view(np.uint32)
    rounded = (bits + ((bits >> 13) & np.uint32(1)) + np.uint32(0xFFF)) & np.uint32(0xFFFFE000)
    if saturate:
        rounded = np.where(rounded & 0x7FFFFFFF == 0x7F800000, rounded - np.uint32(0x2000), rounded)
    return np.where(np.isnan(values), np.uint32(0x7FFFE000), rounded)


def _encode_f16(values: Floats, saturate: bool) -> Raw:
    if saturate:
        values = np.clip(values, -65504, 65504)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _encode_small(small: Small, values: Floats, saturate: bool) -> Raw:
    magnitude = np.abs(values.astype(np.float64))
    finite = np.where(np.isfinite(magnitude), magnitude, 0.0)
    exponent = np.where(finite > 0, np.frexp(finite)[1] - 1, small.lowest_exponent)
    exponent = np.maximum(exponent, small.lowest_exponent)
    # The exponent field counts multiples of 2**mantissa, so a carry out of the mantissa lands where it
    # belongs.
    code = np.rint(np.ldexp(finite, small.mantissa - exponent)).astype(np.int64)
    code += (exponent - small.lowest_exponent) << small.mantissa
    code = np.where(np.isinf(magnitude), 0xFF, code)
    beyond = small.infinity if small.infinity is not None else small.nan
    if saturate or beyond is None:
        beyond = small.largest
    code = np.where(code > small.largest, beyond, code)
    code = np.where(np.signbit(values), code | small.sign, code)
    nan = small.largest if small.nan is None else small.nan
    return np.where(np.isnan(values), nan, code).astype(np.uint8)
