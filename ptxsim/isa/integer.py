"""Integer arithmetic, with the extended-precision forms that use the carry flag. PTX ISA 9.7.1 and 9.7.2.

`add`, `sub`, `mul`, `mad`, `div`, `abs`, `neg`, `min` and `max` come here through arithmetic.py.
"""

from __future__ import annotations

import numpy as np

from ptxsim.isa.lanewise import (
    Function,
    element_type,
    lanewise,
    target,
    value,
)
from ptxsim.isa.operands import Array
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, Translator, translates
from ptxsim.ptx.nodes import WIDTHS, Instruction
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask

_WIDE = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}


def integer(ins: Instruction, form: Form) -> Step | Act:
    """Integer forms of the instructions that exist for floating point too."""
    if ins.name in ("add", "sub") and "cc" in form.flags:
        return carrying(ins, form)
    return _FAMILIES[ins.name](ins, form)


# --- add, sub, neg, abs, min, max ---------------------------------------------------------------------------


def _sum(ins: Instruction, form: Form) -> Step:
    type = form.type
    function: Function = np.add if ins.name == "add" else np.subtract
    if "sat" in form.flags:
        function = _saturating(function)
    return lanewise(ins, type, (type, type), function)


def _saturating(function: Function) -> Function:
    """On s32: the exact result, clamped."""
    info = np.iinfo(np.int32)
    return lambda a, *rest: np.clip(
        function(a.astype(np.int64), *(x.astype(np.int64) for x in rest)), info.min, info.max
    )


def _minmax(ins: Instruction, form: Form) -> Step:
    type = form.type
    function: Function = np.minimum if ins.name == "min" else np.maximum
    if "relu" in form.flags:
        zero, plain = np.zeros((), element_type(type)), function
        return lanewise(ins, type, (type, type), lambda a, b: np.maximum(plain(a, b), zero))
    return lanewise(ins, type, (type, type), function)


def _sign(ins: Instruction, form: Form) -> Step:
    return lanewise(ins, form.type, (form.type,), np.negative if ins.name == "neg" else np.abs)


# --- mul, mad and their relatives ---------------------------------------------------------------------------


def high(a: Array, b: Array) -> Array:
    """The upper half of the products, of the operands' type."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{bits // 4}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a1, a0, b1, b0 = ua >> half, ua & low, ub >> half, ub & low
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    result = a1 * b1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        zero = np.uint64(0)
        result = result - np.where(a < 0, ub, zero) - np.where(b < 0, ua, zero)
    return result.view(a.dtype)


def _wide(a: Array, b: Array) -> Array:
    dtype = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(dtype) * b.astype(dtype)


_HALVES: dict[str, Function] = {"lo": np.multiply, "hi": high, "wide": _wide}


def _product(ins: Instruction, form: Form) -> Step:
    """mul and mad."""
    mode, type = form.one_of("lo", "hi", "wide"), form.type
    result, half = _WIDE[type] if mode == "wide" else type, _HALVES[mode]
    if ins.name == "mul":
        return lanewise(ins, result, (type, type), half, half)
    if "sat" in form.flags:
        add = _saturating(np.add)
        return lanewise(ins, result, (type, type, result), lambda a, b, c: add(half(a, b), c))

    def product_and_sum(a: Array, b: Array, c: Array) -> Array:
        return half(a, b) + c

    return lanewise(ins, result, (type, type, result), product_and_sum, product_and_sum)


@translates("mul24", "mad24")
def product24(ins: Instruction, form: Form) -> Step:
    """Products of the low 24 bits, sign-extended for s32: 9.7.1.5 and 9.7.1.6."""
    type, mode = form.type, form.one_of("lo", "hi")
    dtype = element_type(type).type

    def product(a: Array, b: Array) -> Array:
        x, y = ((v << dtype(8) >> dtype(8)).astype(np.int64) for v in (a, b))
        return (x * y >> 16 if mode == "hi" else x * y).astype(dtype)

    if ins.name == "mul24":
        return lanewise(ins, type, (type, type), product)
    add = _saturating(np.add) if "sat" in form.flags else np.add
    return lanewise(ins, type, (type, type, type), lambda a, b, c: add(product(a, b), c))


@translates("sad")
def sad(ins: Instruction, form: Form) -> Step:
    """c + |a - b|, wrapping: 9.7.1.7."""
    return lanewise(
        ins, form.type, (form.type,) * 3, lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b))
    )


# --- div and rem --------------------------------------------------------------------------------------------


def remainder(a: Array, b: Array) -> Array:
    """a - b * trunc(a / b). For b = 0, which the ISA leaves open, a: what Nvidia's division routine gives."""
    result = np.fmod(a, b)
    return result if np.count_nonzero(b) == b.size else np.where(b == 0, a, result)


def quotient(a: Array, b: Array) -> Array:
    """trunc(a / b), wrapping. For b = 0, which the ISA leaves open, all ones."""
    if np.count_nonzero(b) == b.size:
        return (a - np.fmod(a, b)) // b
    one = b.dtype.type(1)
    safe = np.where(b == 0, one, b)
    return np.where(b == 0, ~np.zeros((), b.dtype), quotient(a, safe))


def _division(ins: Instruction, form: Form) -> Step:
    return lanewise(ins, form.type, (form.type,) * 2, quotient)


@translates("rem")
def rem(ins: Instruction, form: Form) -> Step:
    return lanewise(ins, form.type, (form.type,) * 2, remainder)


_FAMILIES: dict[str, Translator] = {
    "add": _sum,
    "sub": _sum,
    "min": _minmax,
    "max": _minmax,
    "neg": _sign,
    "abs": _sign,
    "mul": _product,
    "mad": _product,
    "div": _division,
}

# --- the carry flag -----------------------------------------------------------------------------------------


@translates("addc", "subc", "madc", "mad.lo.cc", "mad.hi.cc")
def carrying(ins: Instruction, form: Form) -> Step:
    """add.cc, addc, sub.cc, subc, mad.cc and madc: 9.7.2. Signed types compute the same bits."""
    type, mode, out = form.type, form.one_of("lo", "hi"), "cc" in form.flags
    name = ins.name.removesuffix("c")
    takes, unsigned = ins.name.endswith("c"), f"u{WIDTHS[type]}"
    if name == "mad" and mode == "hi":
        a, b = value(ins, 1, type), value(ins, 2, type)
    else:
        a, b = value(ins, 1, unsigned), value(ins, 2, unsigned)
    c, d = value(ins, len(ins.operands) - 1, unsigned), target(ins, 0, unsigned)
    dtype, half = element_type(unsigned), _HALVES[mode or "lo"]

    def step(warp: Warp, mask: Mask) -> None:
        carry = warp.carry
        x, y = (half(a(warp), b(warp)).view(dtype), c(warp)) if name == "mad" else (a(warp), b(warp))
        come = carry.astype(dtype) if takes else dtype.type(0)
        if name == "sub":
            result = x - y - come
            leave = (x < y) | ((x == y) & (come != 0))
        else:
            result = x + y + come
            leave = (result < x) | ((result == x) & (come != 0))
        d(warp, result, mask)
        if out:
            np.copyto(carry, leave, where=True if mask is None else mask)

    return step


@translates("dp4a", "dp2a")
def dot(ins: Instruction, form: Form) -> Step:
    """Dot products of bytes, or of halves and bytes, added to c: 9.7.1.23 and 9.7.1.24."""
    four, mode = ins.name == "dp4a", form.one_of("lo", "hi")
    first, second = (t[0].replace("s", "i") for t in form.types)
    start = 2 if mode == "hi" else 0

    def sums(a: Array, b: Array, c: Array) -> Array:
        x = a.view(f"{first}{1 if four else 2}").reshape(LANES, -1).astype(np.int64)
        y = b.view(f"{second}1").reshape(LANES, 4).astype(np.int64)
        return ((x * (y if four else y[:, start : start + 2])).sum(axis=1) + c).astype(np.uint32)

    return lanewise(ins, "b32", ("b32", "b32", "b32"), sums)
