"""Approximations: ex2 lg2 sin cos tanh rsqrt, and rcp, sqrt and div with .approx or .full. PTX ISA 9.7.3 and
9.7.4.

Each result is the correctly rounded one or next to it (fp64 functions of the host, rounded), so it lies
within the ISA's documented error; silicon's bits may differ from it by up to that error. Zeros, infinities,
NaNs and subnormals give exactly what the ISA's tables say.

| instruction       | largest error that the ISA allows                                       |
|-------------------|-------------------------------------------------------------------------|
| ex2.f32           | 2 ulp                                                                   |
| ex2.f16, .bf16    | 2**-9.9, 2**-7 relative                                                 |
| lg2.f32           | 2**-22 absolute within (0.5, 2), relative elsewhere                     |
| rcp.f32           | 1 ulp                                                                   |
| sqrt.f32          | 2**-23 relative                                                         |
| rsqrt.f32         | 2**-22.9 relative                                                       |
| div.approx, .full | 2 ulp; .approx for divisors of 2**-126 to 2**126                        |
| sin, cos          | 2**-20.5 absolute within 2 pi, 2**-14.7 within 100 pi, no bound outside |
| tanh.f32          | 2**-11 relative                                                         |
| tanh.f16, .bf16   | 2**-10.987, 2**-8 absolute                                              |
"""

from __future__ import annotations

import numpy as np

from ptxsim.isa.halves import HALVES, Half
from ptxsim.isa.lanewise import Function, lanewise
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import NAN64, canonical, flushed, single
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import Instruction

_ONE = np.float32(1)
_LARGE = np.float32(2.0**126)
_UPPER_HALF = np.uint64(0xFFFFFFFF00000000)
_SMALLEST_DOUBLE = np.finfo(np.float64).smallest_normal


def _in_double(function: Function) -> Function:
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


def _inverse_root(a: Array) -> Array:
    return 1 / np.sqrt(a)


_SINGLE: dict[str, Function] = {
    "ex2": _in_double(np.exp2),
    "lg2": _in_double(np.log2),
    "sin": _in_double(np.sin),
    "cos": _in_double(np.cos),
    "tanh": _in_double(np.tanh),
    "rsqrt": _in_double(_inverse_root),
    "rcp": lambda a: np.divide(_ONE, a),
    "sqrt": np.sqrt,
}
_FEELS_SUBNORMALS = {"lg2", "rsqrt", "rcp", "sqrt"}
"""Functions whose results change when a subnormal operand is flushed; the others' do not, or are flushed
themselves."""


@translates("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")
def approximation(ins: Instruction, form: Form) -> Step:
    """Also rcp, sqrt and div, where they have .approx or .full."""
    if ins.name == "div":
        return _division(ins, form)
    if form.type in HALVES:
        return Half(form.type).step(ins, 1, np.exp2 if ins.name == "ex2" else np.tanh, form.flags)
    if form.type == "f64":
        return _of_double(ins, form)
    function = _SINGLE[ins.name]
    if "ftz" not in form.flags:
        return lanewise(ins, "f32", ("f32",), plain := lambda a: canonical(function(a)), plain)
    flushing = _flushing(function, ins.name in _FEELS_SUBNORMALS)
    return lanewise(ins, "f32", ("f32",), flushing, flushing)


def _flushing(function: Function, both: bool) -> Function:
    """.ftz: results are flushed, and operands where it makes a difference."""

    def apply(a: Array) -> Array:
        if both and single(a).any_nan_or_subnormal(a):
            a = flushed(a)
        result = function(a)
        return canonical(flushed(result)) if single(result).any_nan_or_subnormal(result) else result

    return apply


def _of_double(ins: Instruction, form: Form) -> Step:
    """rsqrt.approx.f64, and the gross approximations rcp and rsqrt.approx.ftz.f64: operand and result are the
    upper 32 bits, here the operand's and the result's cut off."""
    if "ftz" not in form.flags:
        return lanewise(ins, "f64", ("f64",), _inverse_root)
    function: Function = _inverse_root if ins.name == "rsqrt" else np.reciprocal

    def gross(a: Array) -> Array:
        upper = flushed((a.view(np.uint64) & _UPPER_HALF).view(np.float64), _SMALLEST_DOUBLE)
        result = flushed(function(upper), _SMALLEST_DOUBLE)
        cut = (result.view(np.uint64) & _UPPER_HALF).view(np.float64)
        return np.where(np.isnan(a) | np.isnan(cut), NAN64, cut)

    return lanewise(ins, "f64", ("f64",), gross)


def _division(ins: Instruction, form: Form) -> Step:
    """.approx multiplies by a reciprocal, which is 0 for divisors above 2**126: 9.7.3.8."""
    ftz, approx = "ftz" in form.flags, "approx" in form.flags

    def divide(a: Array, b: Array) -> Array:
        if ftz:
            a, b = flushed(a), flushed(b)
        result = np.divide(a, b)
        if approx:
            large = (np.abs(b) > _LARGE) & np.isfinite(b)
            result = np.where(large, a * np.copysign(np.float32(0), b), result)
        return canonical(flushed(result) if ftz else result)

    return lanewise(ins, "f32", ("f32", "f32"), divide)
