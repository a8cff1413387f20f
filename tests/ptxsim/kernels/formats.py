"""Number formats of the ISA: bits to values, and values rounded to a format, in exact float64 arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """`precision` counts the leading one. Without infinity, what is too large is `largest` or NaN."""

    width: int
    precision: int
    lowest: int
    """exponent of the smallest normal number"""
    largest: float
    infinity: bool = True

    def values(self, bits: Tensor) -> Tensor:
        """Bits, in the low end of integers, to float64."""
        bits = bits.long() & ((1 << self.width) - 1)
        fraction_bits = self.precision - 1
        fraction = (bits & ((1 << fraction_bits) - 1)).double()
        exponent_ones = (1 << (self.width - self.precision)) - 1
        exponent = (bits >> fraction_bits) & exponent_ones
        normal = exponent > 0
        scale = torch.ldexp(
            torch.ones_like(fraction), exponent.clamp(min=1) - 1 + self.lowest - fraction_bits
        )
        value = (fraction + normal * 2.0**fraction_bits) * scale
        if self.infinity:
            value = torch.where(
                exponent == exponent_ones, torch.where(fraction == 0, torch.inf, torch.nan), value
            )
        else:
            value = torch.where(value > self.largest, torch.nan, value)
        return torch.where(bits >> (self.width - 1) == 1, -value, value)

    def rounded(self, value: Tensor, mode: str = "rn", saturate: bool = False) -> Tensor:
        """float64 `value` to the nearest, ties to even (rn) or away from zero (rna), or towards zero (rz),
        minus (rm) or plus (rp) infinity. `saturate` gives `largest` for what is too large."""
        _, exponent = torch.frexp(value)
        step = torch.ldexp(torch.ones_like(value), (exponent - 1).clamp(min=self.lowest) - self.precision + 1)
        scaled = value / step
        whole = {
            "rn": torch.round,
            "rna": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
            "rz": torch.trunc,
            "rm": torch.floor,
            "rp": torch.ceil,
        }[mode](scaled)
        result = torch.where(value.isfinite() & (value != 0), torch.copysign(whole * step, value), value)
        too_large = (result.abs() > self.largest) & value.isfinite()
        largest = torch.full_like(value, self.largest)
        towards_zero = {"rn": False, "rna": False, "rz": True, "rm": value > 0, "rp": value < 0}[mode]
        limit = torch.where(torch.as_tensor(towards_zero), largest, torch.inf)
        result = torch.where(too_large, torch.copysign(limit, value), result)
        if saturate:
            result = torch.where(result.abs() > self.largest, torch.copysign(largest, value), result)
        return result

    def flushed(self, value: Tensor) -> Tensor:
        """Subnormal numbers to zero of the same sign."""
        small = value.abs() < 2.0**self.lowest
        return torch.where(small, torch.copysign(torch.zeros_like(value), value), value)


F32 = Format(32, 24, -126, (2 - 2**-23) * 2.0**127)
F16 = Format(16, 11, -14, 65504.0)
BF16 = Format(16, 8, -126, (2 - 2**-7) * 2.0**127)
TF32 = Format(32, 11, -126, (2 - 2**-10) * 2.0**127)
E4M3 = Format(8, 4, -6, 448.0, infinity=False)
E5M2 = Format(8, 3, -14, 57344.0)
FORMATS = {"f32": F32, "f16": F16, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "tf32": F32}
"""Formats by their names in PTX. A tf32 number is an fp32 number with a short fraction."""


def added(a: Tensor, b: Tensor) -> Tensor:
    """a + b in float64, rounded to odd: rounding the result once more, to half the precision or less, gives
    what rounding the exact sum would."""
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    inexact = (rest != 0) & total.isfinite() & rest.isfinite()
    even = total.view(torch.int64) % 2 == 0
    towards = torch.where(rest > 0, torch.inf, -torch.inf).double()
    return torch.where(inexact & even, torch.nextafter(total, towards), total)
