"""cvt between single numbers: integers of every width, f16, bf16, tf32, f32 and f64. PTX ISA 9.7.9.21.

Packed forms are in packing.py. A register wider than its type is cut when read, and extended when written.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ptxsim.isa.fixed_point import TYPE, fixed_point
from ptxsim.isa.formats import FORMATS, encode, f16_bits
from ptxsim.isa.halves import half_values
from ptxsim.isa.lanewise import (
    Function,
    elementwise,
    require,
    target,
    value,
)
from ptxsim.isa.operands import Array, Read, Write
from ptxsim.isa.packing import PACKED_FORMATS, packed_conversion
from ptxsim.isa.rounding import (
    ROUNDINGS,
    canonical,
    flushed,
    odd_float,
    rectified,
    rounded,
    saturated,
    to_single,
)
from ptxsim.isa.stochastic import stochastic
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import WIDTHS, Instruction, Reg
from ptxsim.units import numbers

_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64))


@translates("cvt")
def cvt(ins: Instruction, form: Form) -> Step:
    to, of = form.types
    if TYPE in form.types:
        return fixed_point(ins, form)
    if "rs" in form.flags:
        return stochastic(ins, form)
    if to in PACKED_FORMATS or of in PACKED_FORMATS:
        return packed_conversion(ins, form)
    if to in _INTEGERS:
        return _integers(ins, form, to, of) if of in _INTEGERS else _to_integer(ins, form, to, of)
    return _from_integer(ins, form, to, of) if of in _INTEGERS else _floats(ins, form, to, of)


# --- registers wider than the type --------------------------------------------------------------------------


def _dtype(type: str) -> np.dtype[Any]:
    """numpy dtype of an integer type."""
    return np.dtype(f"{'i' if type[0] == 's' else 'u'}{WIDTHS[type] // 8}")


def _source(ins: Instruction, type: str) -> Read:
    """Operand 1: integers in their own type, fp32 and fp64 as they are, halves as bits."""
    operand, width = ins.operands[1], WIDTHS[type]
    file = operand.file if isinstance(operand, Reg) else max(width, 16)
    if type in ("f32", "f64"):
        return value(ins, 1, type)
    if type == "bf16" or file == width:
        return value(ins, 1, "b16" if type in _FLOATS else type)
    require(file > width, ins, "a source narrower than its type")
    whole, dtype = value(ins, 1, f"u{file}"), np.dtype(f"u{width // 8}") if type in _FLOATS else _dtype(type)
    return lambda warp: whole(warp).astype(dtype)


def _result(ins: Instruction, type: str) -> Write:
    """Operand 0, for integers in their own type or bits of halves and tf32: extended by sign if the type has
    one."""
    operand, width = ins.operands[0], WIDTHS.get(type, 32)
    if type in ("f32", "f64"):
        return target(ins, 0, type)
    file = operand.file if isinstance(operand, Reg) else max(width, 16)
    require(file == width or (file > width and type not in ("bf16", "tf32")), ins, "the width of the result")
    return target(ins, 0, f"{'s' if type[0] == 's' else 'u'}{file}")


# --- integers -----------------------------------------------------------------------------------------------


def _integers(ins: Instruction, form: Form, to: str, of: str) -> Step:
    a, d = _source(ins, of), _result(ins, to)
    operand, dtype = ins.operands[0], _dtype(to)
    if "sat" in form.flags:
        here, there = np.iinfo(_dtype(of)), np.iinfo(dtype)
        low, high = max(here.min, there.min), min(here.max, there.max)
        require((low, high) != (here.min, here.max), ins, ".sat where nothing can overflow")
        return lambda warp, mask: d(warp, np.clip(a(warp), low, high).astype(dtype), mask)
    if isinstance(operand, Reg) and operand.file == WIDTHS[to]:
        return _whole(ins, lambda warp, mask: d(warp, a(warp), mask), to, of)  # storing wraps
    return lambda warp, mask: d(warp, a(warp).astype(dtype), mask)


def _whole(ins: Instruction, step: Step, to: str, of: str) -> Step:
    """Between registers of just these widths, a conversion that storing does."""
    source = ins.operands[1]
    fits = isinstance(source, Reg) and source.file == WIDTHS[of]
    return elementwise(ins, step, to, (of,), lambda values: values) if fits else step


def _from_integer(ins: Instruction, form: Form, to: str, of: str) -> Step:
    mode, wide = form.named["rnd"], WIDTHS[of] == 64
    a, d, sat = _source(ins, of), _result(ins, to), "sat" in form.flags

    def convert(integers: Array) -> Array:
        if to == "f64" and wide:
            values = rounded(mode, lambda: integers.astype(np.float64))
        else:
            values = odd_float(integers) if wide else integers.astype(np.float64)
        return _round(saturated(values) if sat else values, to, mode)

    return lambda warp, mask: d(warp, convert(a(warp)), mask)


# --- floating point -----------------------------------------------------------------------------------------


def _values(bits: Array, type: str) -> Array:
    """fp64 of what _source gives."""
    if type in ("f16", "bf16"):
        return half_values(type, bits).astype(np.float64)
    return bits.astype(np.float64)


def _round(values: Array, to: str, mode: str, finite: bool = False) -> Array:
    """fp64 values, exact or rounded to odd, as _result takes them."""
    if to == "f64":
        return values
    if to == "f32":
        return canonical(rounded(mode, to_single, values))
    codes = encode(values, FORMATS[to], mode, finite)
    return np.where(np.isnan(values), 0x7FFFFFFF, codes << 13) if to == "tf32" else codes


def _to_integer(ins: Instruction, form: Form, to: str, of: str) -> Step:
    """Out of range becomes the nearest number in range; NaN 0, or for 64-bit types on either side 1 << (n -
    1)."""
    a, d, dtype = _source(ins, of), _result(ins, to), _dtype(to)
    integral, ftz, info = _INTEGRAL[form.named["integral"]], "ftz" in form.flags, np.iinfo(dtype)
    nan = 1 << (WIDTHS[to] - 1) if of == "f64" or WIDTHS[to] == 64 else 0
    for_nan = np.array(nan, f"u{dtype.itemsize}").view(dtype)
    top = float(info.max) if WIDTHS[to] < 64 else 2.0 ** (64 if to == "u64" else 63)

    def convert(bits: Array) -> Array:
        values = _values(flushed(bits) if ftz else bits, of)
        whole = integral(values)
        inside = (whole >= float(info.min)) & (whole < top)
        result = np.where(inside, whole, 0.0).astype(dtype)
        result = np.where(whole >= top, dtype.type(info.max), result)
        result = np.where(whole < float(info.min), dtype.type(info.min), result)
        return np.where(np.isnan(values), for_nan, result)

    return lambda warp, mask: d(warp, convert(a(warp)), mask)


_DROPPED = 0x1FFF
"""Bits of fp32 that tf32 has not."""


def _floats(ins: Instruction, form: Form, to: str, of: str) -> Step:
    """.rna cuts NaN off as Hopper does: one that only has bits which tf32 drops becomes infinity."""
    flags, mode, whole = form.flags, form.one_of(*ROUNDINGS, "rna"), form.one_of(*_INTEGRAL)
    a, d = _source(ins, of), _result(ins, to)
    integral, flush_in = _INTEGRAL.get(whole), "ftz" in flags and of == "f32"
    flush_out = "ftz" in flags and to == "f32"
    if of == "f32" and flags == {"rn"} and to in ("f16", "bf16"):
        narrow = f16_bits if to == "f16" else partial(numbers.encode, "bf16")
        return lambda warp, mask: d(warp, narrow(a(warp)), mask)

    def convert(bits: Array) -> Array:
        values = _values(flushed(bits) if flush_in else bits, of)
        if integral:
            values = integral(values)
        if "sat" in flags:
            values = saturated(values)
        if "relu" in flags:
            values = rectified(values)
        result = _round(values, to, mode or "rn", "satfinite" in flags)
        if mode == "rna" and "satfinite" not in flags:
            result = np.where(np.isnan(values), bits.view(np.uint32) & ~np.uint32(_DROPPED), result)
        return flushed(result) if flush_out else result

    return lambda warp, mask: d(warp, convert(a(warp)), mask)
