"""fp16 and bf16 as operands: read exactly into fp64, rounded once on the way back. PTX ISA 9.7.4."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ptxsim.isa.formats import FORMATS, f16_bits
from ptxsim.isa.lanewise import Function, lanewise
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import flushed, rectified, rounded, saturated, to_single
from ptxsim.isa.table import Step
from ptxsim.ptx.nodes import Instruction
from ptxsim.units.numbers import encode

HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def half_values(format: str, bits: Array) -> Array:
    """fp32 of uint16 bits of fp16 or bf16."""
    if format == "f16":
        return bits.view(np.float16).astype(np.float32)
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


@dataclass(frozen=True)
class Half:
    """fp16 or bf16, one or two of them to a register."""

    type: str

    @property
    def format(self) -> str:
        return self.type.removesuffix("x2")

    @property
    def bits(self) -> str:
        """The type of the same registers as bits."""
        return "b16x2" if self.type.endswith("x2") else "b16"

    @property
    def smallest(self) -> float:
        return float(2.0 ** FORMATS[self.format].low)

    def round(self, values: Array) -> Array:
        """Bits of fp64 values that are exact or rounded to odd, to nearest even; NaN is 0x7FFF."""
        if self.format == "f16":
            return f16_bits(values)
        cut = rounded("rz", to_single, values)
        odd = cut.view(np.uint32) | (cut != values)
        return encode("bf16", odd.view(np.float32))

    def step(self, ins: Instruction, count: int, function: Function, flags: Collection[str]) -> Step:
        """d = function of `count` operands in fp64, with .ftz, .sat and .relu among the flags."""
        exponent = FORMATS[self.format].infinity or 0  # all ones in the exponent's bits

        def apply(*bits: Array) -> Array:
            values = [half_values(self.format, x).astype(np.float64) for x in bits]
            if "ftz" in flags:
                values = [flushed(x, self.smallest) for x in values]
            result = function(*values)
            if "sat" in flags:
                result = saturated(result)
            if "relu" in flags:
                result = rectified(result)
            codes = self.round(result)
            if "ftz" in flags:
                codes = np.where(codes & exponent == 0, codes & 0x8000, codes)
            return codes

        return lanewise(ins, self.bits, (self.bits,) * count, apply)
