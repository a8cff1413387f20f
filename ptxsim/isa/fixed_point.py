"""cvt to and from s2f6x2: two signed fixed-point numbers of 8 bits, 6 of them below the point. PTX ISA,
"cvt".

.scaled::n2::ue8m0 multiplies each number that is read by the power of two in its byte of a third operand. How
it scales numbers that are written is not modelled.
"""

from __future__ import annotations

import numpy as np

from ptxsim.isa.formats import FORMATS, decode_scale, encode
from ptxsim.isa.lanewise import lanewise
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import rectified
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step
from ptxsim.ptx.nodes import Instruction, Reg
from ptxsim.units.numbers import decode

TYPE, SCALED = "s2f6x2", "scaled::n2::ue8m0"
ONE = 64


def fixed_point(ins: Instruction, form: Form) -> Step:
    """cvt with s2f6x2 on one side."""
    if form.type == TYPE:
        return _read(ins, form.flags)
    return _written(ins, form.type, "relu" in form.flags)


def _read(ins: Instruction, flags: frozenset[str]) -> Step:
    scaled = SCALED in flags

    def convert(pairs: Array, *scales: Array) -> Array:
        values = _bytes(pairs).view(np.int8).astype(np.float64) / ONE
        if scaled:
            values = values * decode_scale(_bytes(scales[0]))
        if "relu" in flags:
            values = rectified(values)
        return encode(values, FORMATS["bf16"], "rn", "satfinite" in flags)

    kinds = [_kind(ins, index) for index in range(1, 3 if scaled else 2)]
    return lanewise(ins, "b16x2", kinds, convert)


def _written(ins: Instruction, of: str, relu: bool) -> Step:
    def codes(values: Array) -> Array:
        wide = np.rint((rectified(values) if relu else values) * ONE)
        return np.clip(np.where(np.isnan(wide), 127, wide), -128, 127).astype(np.int64) & 0xFF

    if of == "f32":
        return lanewise(
            ins,
            _kind(ins, 0),
            ("f32", "f32"),
            lambda a, b: codes(a.astype(np.float64)) << 8 | codes(b.astype(np.float64)),
        )

    def convert(pairs: Array) -> Array:
        both = codes(decode("bf16", pairs).astype(np.float64))
        return both[1::2] << 8 | both[0::2]

    return lanewise(ins, _kind(ins, 0), ("b16x2",), convert)


def _bytes(pairs: Array) -> Array:
    """Lower and upper byte of each of 32 numbers, [64] uint8."""
    return np.ascontiguousarray(pairs.astype(np.uint16)).view(np.uint8)


def _kind(ins: Instruction, index: int) -> str:
    operand = ins.operands[index]
    return f"b{operand.file}" if isinstance(operand, Reg) else "b16"
