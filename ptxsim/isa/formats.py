"""Rounding to narrow floating-point formats: bf16, fp16, tf32 and those of 8, 6 and 4 bits. PTX ISA 9.7.9.21.

Every rounding of cvt, from fp64 values; units/numbers.py reads the formats, and rounds fp32 to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxsim.isa.operands import Array
from ptxsim.units.numbers import SMALL


@dataclass(frozen=True)
class Format:
    """`precision` counts the hidden bit; the smallest normal number is 2**low. `top`, `infinity` and `nan`
    are codes without their sign; None is a format that has none."""

    name: str
    bits: int
    precision: int
    low: int
    top: int
    infinity: int | None
    nan: int | None


FORMATS = {
    "f16": Format("f16", 16, 11, -14, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format("bf16", 16, 8, -126, 0x7F7F, 0x7F80, 0x7FFF),
    "tf32": Format("tf32", 19, 11, -126, 0x3FBFF, 0x3FC00, 0x3FFFF),
}
FORMATS |= {
    name: Format(
        name,
        1 + of.exponent + of.mantissa,
        1 + of.mantissa,
        of.lowest_exponent,
        of.largest,
        of.infinity,
        of.nan,
    )
    for name, of in SMALL.items()
}


def encode(values: Array, to: Format, rounding: str = "rn", finite: bool = False) -> Array:
    """The codes, int64, of fp64 values that are exact or rounded to odd.

    `rounding` is rn (ties to even), rna (ties away), rz, rm or rp; `finite` is .satfinite: the largest number
    for what is too large. NaN gives the positive NaN, or the largest number where the format has none.
    """
    magnitude, negative = np.abs(values), np.signbit(values)
    exponent = np.where(magnitude == 0, to.low, np.maximum(np.frexp(magnitude)[1] - 1, to.low))
    steps = np.ldexp(magnitude, to.precision - 1 - exponent)
    match rounding:
        case "rn":
            steps = np.rint(steps)
        case "rna":
            steps = np.floor(steps + 0.5)
        case "rz":
            steps = np.floor(steps)
        case _:
            steps = np.where(negative == (rounding == "rm"), np.ceil(steps), np.floor(steps))
    finite_values = magnitude < np.inf
    codes = np.where(finite_values, steps, 0).astype(np.int64)
    codes += (exponent.astype(np.int64) - to.low) << (to.precision - 1)
    codes = np.where(codes > to.top, _overflow(negative, to, rounding, finite), codes)
    largest = to.top if finite or to.infinity is None else to.infinity
    codes = np.where(magnitude == np.inf, largest, codes) | negative.astype(np.int64) << (to.bits - 1)
    return np.where(np.isnan(values), to.top if to.nan is None else to.nan, codes)


def _overflow(negative: Array, to: Format, rounding: str, finite: bool) -> Array | int:
    """Result of rounding a finite number beyond the range."""
    if finite or to.infinity is None or rounding == "rz":
        return to.top
    if rounding in ("rn", "rna"):
        return to.infinity
    return np.where(negative == (rounding == "rm"), to.infinity, to.top)


def encode_scale(values: Array, rounding: str, finite: bool) -> Array:
    """Codes of ue8m0, powers of two from 2**-127 to 2**127: .rz takes the power below, .rp the one above;
    0xFF is NaN.

    The sign has no place in the format; a magnitude below the smallest power is rounded as any other, at
    least to it.
    """
    magnitude = np.abs(values)
    fraction, exponent = np.frexp(magnitude)
    power = exponent - 1 + ((fraction > 0.5) & (rounding == "rp"))
    power = np.where(magnitude == 0, -127, np.where(magnitude == np.inf, 128, power))
    codes = np.clip(power, -127, 127 if finite else 128) + 127
    return np.where(np.isnan(values), 0xFF, codes).astype(np.int64)


def decode_scale(codes: Array) -> Array:
    """fp64 values of ue8m0 codes."""
    return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))


def f16_bits(values: Array) -> Array:
    """fp16 bits, uint16, of fp32 or fp64 values, to nearest even; NaN is 0x7FFF."""
    return np.where(values != values, np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))
