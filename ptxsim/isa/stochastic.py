"""cvt.rs.bf16x2.f32: rounding up or down by bits that a kernel draws. PTX ISA 9.7.9.21."""

from __future__ import annotations

import numpy as np

from ptxsim.isa.lanewise import target, value
from ptxsim.isa.operands import Array
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step
from ptxsim.ptx.nodes import Instruction
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask

_MAGNITUDE, _INFINITY, _LARGEST, _NAN = (np.uint32(x) for x in (0x7FFFFFFF, 0x7F800000, 0x7F7F0000, 0x7FFF))


def stochastic(ins: Instruction, form: Form) -> Step:
    """d, a, b, bits: a goes to the upper half, by the upper 16 bits, and b to the lower half."""
    a, b, bits = (value(ins, i, "b32") for i in (1, 2, 3))
    d = target(ins, 0, "b32")

    def step(warp: Warp, mask: Mask) -> None:
        drawn = bits(warp)
        high = _rounded(a(warp), drawn >> np.uint32(16), form.flags)
        d(warp, high << np.uint32(16) | _rounded(b(warp), drawn & np.uint32(0xFFFF), form.flags), mask)

    return step


def _rounded(x: Array, drawn: Array, flags: frozenset[str]) -> Array:
    """Bits of x in bf16, rounded away from zero where the drawn bits and the 16 that are dropped have a
    carry."""
    magnitude = x & _MAGNITUDE
    found = magnitude + np.where(magnitude < _INFINITY, drawn, np.uint32(0))
    if "satfinite" in flags:
        found = np.minimum(found, _LARGEST)
    found = (found | x & ~_MAGNITUDE) >> np.uint32(16)
    if "relu" in flags:
        found = np.where(x > _MAGNITUDE, np.uint32(0), found)
    return np.where(magnitude > _INFINITY, _NAN, found)
