"""Floating-point arithmetic with every bit fixed by the ISA: add sub mul div rcp sqrt abs neg min max, and
testp and copysign. PTX ISA 9.7.3, 9.7.4 and 9.7.5; fused.py has fma and mad, approx.py the approximations.

Single precision gives the NaN 0x7FFFFFFF and halves 0x7FFF, as Hopper does where the ISA says "unspecified".
Double precision keeps payloads, as the host's processor does.
"""

from __future__ import annotations

import numpy as np

from ptxsim.isa import approx
from ptxsim.isa.fused import fma
from ptxsim.isa.halves import HALVES, Half, half_values
from ptxsim.isa.lanewise import (
    Function,
    elements,
    elementwise,
    lanewise,
    target,
    value,
)
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import (
    ROUNDINGS,
    SINGLE,
    canonical,
    flushed,
    rounded,
    saturated,
    single,
)
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, Translator, translates
from ptxsim.ptx.nodes import Instruction, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask


def floating(ins: Instruction, form: Form) -> Step | Act:
    """Floating-point forms of the instructions that exist for integers too."""
    return _FAMILIES[ins.name](ins, form)


# --- add, sub, mul ------------------------------------------------------------------------------------------

_SUMS: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _arithmetic(ins: Instruction, form: Form) -> Step:
    mode, function = form.one_of(*ROUNDINGS) or "rn", _SUMS[ins.name]
    match form.types:
        case ("f32" | "f32x2" as type,):
            if mode == "rn" and not {"ftz", "sat"} & form.flags:
                return _plain(ins, type, function)
            whole = _single(form, mode, function)
            return lanewise(ins, type, (type, type), whole, whole)
        case ("f64",):
            return lanewise(ins, "f64", ("f64",) * 2, lambda a, b: rounded(mode, function, a, b))
        case ("f32", narrow):
            wide = _single(form, mode, function)
            return lanewise(ins, "f32", ("b16", "f32"), lambda a, c: wide(half_values(narrow, a), c))
    return Half(form.type).step(ins, 2, function, form.flags)


def _plain(ins: Instruction, type: str, function: Function) -> Step:
    """fp32 to nearest without modifiers, one ufunc: the hot path."""
    any_nan = SINGLE[elements(type)].any_nan
    if not isinstance(ins.operands[0], Reg):
        return lanewise(ins, type, (type, type), lambda a, b: canonical(function(a, b)))
    d, register, a, b = (target(ins, 0, type), *(value(ins, i, type) for i in range(3)))

    def step(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            d(warp, canonical(function(a(warp), b(warp))), mask)
            return
        result = register(warp)
        function(a(warp), b(warp), result)
        if any_nan(result):
            result[...] = canonical(result)

    return elementwise(ins, step, type, (type, type), lambda a, b: canonical(function(a, b)))


def _single(form: Form, mode: str, function: Function) -> Function:
    """fp32 with rounding, .ftz and .sat as the flags say."""
    ftz, sat = "ftz" in form.flags, "sat" in form.flags
    if mode == "rn" and not (ftz or sat):
        return lambda *values: canonical(function(*values))

    def apply(*values: Array) -> Array:
        if ftz:
            values = tuple(flushed(x) for x in values)
        result = rounded(mode, function, *values)
        if ftz:
            result = flushed(result)
        return saturated(result) if sat else canonical(result)

    return apply


# --- div, rcp, sqrt -----------------------------------------------------------------------------------------


def _reciprocal(a: Array) -> Array:
    return np.divide(a.dtype.type(1), a)


_QUOTIENTS: dict[str, tuple[int, Function]] = {
    "div": (2, np.divide),
    "rcp": (1, _reciprocal),
    "sqrt": (1, np.sqrt),
}


@translates("rcp", "sqrt")
def quotient(ins: Instruction, form: Form) -> Step | Act:
    """IEEE 754 division, reciprocal and square root: 9.7.3.8, 9.7.3.13 and 9.7.3.15. Also div."""
    type, mode = form.type, form.one_of(*ROUNDINGS)
    if not mode:
        return approx.approximation(ins, form)
    count, function = _QUOTIENTS[ins.name]
    if type == "f32":
        return lanewise(ins, type, (type,) * count, _single(form, mode, function))
    return lanewise(ins, type, (type,) * count, lambda *values: rounded(mode, function, *values))


# --- abs, neg, copysign, testp ------------------------------------------------------------------------------


def _sign(ins: Instruction, form: Form) -> Step:
    function: Function = np.negative if ins.name == "neg" else np.abs
    type = form.type
    if type == "f32":
        whole = _single(form, "rn", function)
        return lanewise(ins, type, (type,), whole, whole)
    if type == "f64":
        return lanewise(ins, type, (type,), function)
    return Half(type).step(ins, 1, function, form.flags)


@translates("copysign")
def copysign(ins: Instruction, form: Form) -> Step:
    """d, a, b: b with the sign of a."""
    return lanewise(ins, form.type, (form.type,) * 2, lambda a, b: np.copysign(b, a))


_PROPERTIES: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: a == a,
    "notanumber": np.isnan,
    "subnormal": lambda a: (np.abs(a) < np.finfo(a.dtype).smallest_normal) & (a != 0),
    "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= np.finfo(a.dtype).smallest_normal) | (a == 0)),
}


@translates("testp")
def testp(ins: Instruction, form: Form) -> Step:
    return lanewise(ins, "pred", (form.type,), _PROPERTIES[form.named["property"]])


# --- min and max --------------------------------------------------------------------------------------------


def _extreme(name: str, propagate: bool) -> Function:
    """min or max of two arrays in which -0 < +0, with NaN where both are, or either with `propagate`
    (.NaN)."""
    greatest = np.maximum if propagate else np.fmax
    least = np.minimum if propagate else np.fmin
    plain = greatest if name == "max" else least

    def extreme(a: Array, b: Array) -> Array:
        # the processor takes the zeros of both signs for equal; +0 is the sum of unequal ones
        zero = a + b if name == "max" else -(-a - b)
        return np.where((a == 0) & (b == 0), zero, plain(a, b))

    return extreme


def _minmax(ins: Instruction, form: Form) -> Step:
    type, count, flags = form.type, len(ins.operands) - 1, form.flags
    if type == "f32" and flags <= {"NaN"}:
        return _hot_minmax(ins, count, "NaN" in flags)
    extreme = _with_signs(_extreme(ins.name, "NaN" in flags), flags)
    if type in HALVES:
        return Half(type).step(ins, 2, extreme, flags)
    if type == "f64":
        return lanewise(ins, type, (type, type), extreme)
    return lanewise(ins, type, (type,) * count, _single(form, "rn", extreme))


def _with_signs(extreme: Function, flags: frozenset[str]) -> Function:
    """.abs and .xorsign around a function of two arrays, for two or three of them."""

    def apply(a: Array, b: Array, *third: Array) -> Array:
        sign = np.signbit(a) ^ np.signbit(b)
        values = [np.abs(x) if "abs" in flags else x for x in (a, b, *third)]
        result = extreme(values[0], values[1])
        if third:
            result = extreme(result, values[2])
        return np.where(sign & (result == result), -result, result) if "xorsign" in flags else result

    return apply


def _hot_minmax(ins: Instruction, count: int, propagate: bool) -> Step:
    """fp32 min and max of two or three: zeros and NaNs get their care only where there are any."""
    extreme = _extreme(ins.name, propagate)
    plain: Function = {
        ("max", True): np.maximum,
        ("max", False): np.fmax,
        ("min", True): np.minimum,
        ("min", False): np.fmin,
    }[ins.name, propagate]

    def two(a: Array, b: Array) -> Array:
        result = plain(a, b)
        return canonical(extreme(a, b)) if single(result).any_nan_or_zero(result) else result

    def three(a: Array, b: Array, c: Array) -> Array:
        result = plain(plain(a, b), c)
        return canonical(extreme(extreme(a, b), c)) if single(result).any_nan_or_zero(result) else result

    function: Function = two if count == 2 else three
    return lanewise(ins, "f32", ("f32",) * count, function, function)


_FAMILIES: dict[str, Translator] = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "mad": fma,
    "div": quotient,
    "abs": _sign,
    "neg": _sign,
    "min": _minmax,
    "max": _minmax,
}
