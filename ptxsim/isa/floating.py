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
    Form,
    Function,
    elements,
    elementwise,
    form,
    lanewise,
    only_type,
    require,
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
from ptxsim.isa.table import Act, Step, Translator, Unmodelled, translates
from ptxsim.ptx.nodes import Instruction, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask


def floating(ins: Instruction) -> Step | Act:
    """Floating-point forms of the instructions that exist for integers too."""
    return _FAMILIES[ins.name](ins)


# --- add, sub, mul ------------------------------------------------------------------------------------------

_SUMS: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _arithmetic(ins: Instruction) -> Step:
    found = form(ins, (*ROUNDINGS, "ftz", "sat"), [ROUNDINGS])
    mode, function = found.one_of(*ROUNDINGS) or "rn", _SUMS[ins.name]
    match found.types:
        case ("f32",) | ("f32x2",):
            type = found.types[0]
            require(type == "f32" or "sat" not in found.flags, ins, ".sat")
            if mode == "rn" and not {"ftz", "sat"} & found.flags:
                return _plain(ins, type, function)
            whole = _single(found, mode, function)
            return lanewise(ins, type, (type, type), whole, whole)
        case ("f64",):
            require(not {"ftz", "sat"} & found.flags, ins, "modifiers")
            return lanewise(ins, "f64", ("f64",) * 2, lambda a, b: rounded(mode, function, a, b))
        case ("f32", "f16" | "bf16" as narrow):
            require(ins.name != "mul" and "ftz" not in found.flags, ins)
            wide = _single(found, mode, function)
            return lanewise(ins, "f32", ("b16", "f32"), lambda a, c: wide(half_values(narrow, a), c))
        case (type,) if type in HALVES:
            require(mode == "rn" and (type[0] == "f" or not {"ftz", "sat"} & found.flags), ins, "modifiers")
            return Half(type).step(ins, 2, function, found.flags)
    raise Unmodelled(ins, "types")


def _plain(ins: Instruction, type: str, function: Function) -> Step:
    """fp32 to nearest without modifiers, one ufunc: the hot path."""
    any_nan = SINGLE[elements(type)].any_nan
    if not isinstance(ins.operands[0], Reg):
        return lanewise(ins, type, (type, type), lambda a, b: canonical(function(a, b)))
    require(len(ins.operands) == 3, ins, "another number of operands")
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


def _single(found: Form, mode: str, function: Function) -> Function:
    """fp32 with rounding, .ftz and .sat as the flags say."""
    ftz, sat = "ftz" in found.flags, "sat" in found.flags
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
def quotient(ins: Instruction) -> Step | Act:
    """IEEE 754 division, reciprocal and square root: 9.7.3.8, 9.7.3.13 and 9.7.3.15. Also div."""
    if ins.has("approx") or ins.has("full"):
        return approx.approximation(ins)
    found = form(ins, (*ROUNDINGS, "ftz"), [ROUNDINGS])
    type, mode = only_type(ins, found, ("f32", "f64")), found.one_of(*ROUNDINGS)
    require(mode, ins, "no rounding")
    count, function = _QUOTIENTS[ins.name]
    if type == "f32":
        return lanewise(ins, type, (type,) * count, _single(found, mode, function))
    require("ftz" not in found.flags, ins, ".ftz")
    return lanewise(ins, type, (type,) * count, lambda *values: rounded(mode, function, *values))


# --- abs, neg, copysign, testp ------------------------------------------------------------------------------


def _sign(ins: Instruction) -> Step:
    found = form(ins, ("ftz",))
    function: Function = np.negative if ins.name == "neg" else np.abs
    type = only_type(ins, found, ("f32", "f64", *HALVES))
    require(not found.flags or type in ("f32", "f16", "f16x2"), ins, ".ftz")
    if type == "f32":
        whole = _single(found, "rn", function)
        return lanewise(ins, type, (type,), whole, whole)
    if type == "f64":
        return lanewise(ins, type, (type,), function)
    return Half(type).step(ins, 1, function, found.flags)


@translates("copysign")
def copysign(ins: Instruction) -> Step:
    """d, a, b: b with the sign of a."""
    type = only_type(ins, form(ins, ()), ("f32", "f64"))
    return lanewise(ins, type, (type, type), lambda a, b: np.copysign(b, a))


_PROPERTIES: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: a == a,
    "notanumber": np.isnan,
    "subnormal": lambda a: (np.abs(a) < np.finfo(a.dtype).smallest_normal) & (a != 0),
    "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= np.finfo(a.dtype).smallest_normal) | (a == 0)),
}


@translates("testp")
def testp(ins: Instruction) -> Step:
    found = form(ins, tuple(_PROPERTIES), [tuple(_PROPERTIES)])
    type = only_type(ins, found, ("f32", "f64"))
    require(found.flags, ins, "no property")
    return lanewise(ins, "pred", (type,), _PROPERTIES[found.one_of(*_PROPERTIES)])


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


def _minmax(ins: Instruction) -> Step:
    found = form(ins, ("ftz", "NaN", "xorsign", "abs"))
    type = only_type(ins, found, ("f32", "f64", *HALVES))
    count, flags = len(ins.operands) - 1, found.flags
    require(count == 2 or (count == 3 and type == "f32" and "xorsign" not in flags), ins, "operands")
    require("xorsign" not in flags or "abs" in flags, ins, ".xorsign without .abs")
    require("abs" not in flags or "xorsign" in flags or count == 3, ins, ".abs without .xorsign")
    require(type != "f64" or not flags, ins, "modifiers of f64")
    require(type[0] != "b" or "ftz" not in flags, ins, ".ftz")
    if type == "f32" and flags <= {"NaN"}:
        return _hot_minmax(ins, count, "NaN" in flags)
    extreme = _with_signs(_extreme(ins.name, "NaN" in flags), flags)
    if type in HALVES:
        return Half(type).step(ins, 2, extreme, flags)
    if type == "f64":
        return lanewise(ins, type, (type, type), extreme)
    return lanewise(ins, type, (type,) * count, _single(found, "rn", extreme))


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
