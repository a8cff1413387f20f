"""fma and mad on floating point, rounded once. PTX ISA 9.7.3.6, 9.7.3.7, 9.7.4.4 and 9.7.5.3.

numpy has no fused multiply-add. The product of two fp32 numbers is exact in fp64; their sum with a third is
not, and rounding it again to fp32 goes wrong only where the fp64 sum lies halfway between two fp32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ptxsim.isa.halves import Half, half_values
from ptxsim.isa.lanewise import Function, elements, lanewise
from ptxsim.isa.operands import Array
from ptxsim.isa.rounding import (
    ROUNDINGS,
    canonical,
    flushed,
    odd_sum,
    rounded,
    saturated,
    single,
    to_single,
)
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.ptx.nodes import Instruction


@translates("fma")
def fma(ins: Instruction, form: Form) -> Step:
    """d = a b + c; also mad on floating point, which is the same."""
    mode = form.one_of(*ROUNDINGS)
    match form.types:
        case ("f32" | "f32x2" as type,):
            alone, many = _single(form, mode, elements(type)), _single(form, mode, None)
            return lanewise(ins, type, (type,) * 3, alone, many)
        case ("f32", narrow):
            fused = _of_halves if form.flags == {"rn"} else _single(form, mode, None)

            def of_halves(a: Array, b: Array, c: Array) -> Array:
                return fused(half_values(narrow, a), half_values(narrow, b), c)

            return lanewise(ins, "f32", ("b16", "b16", "f32"), of_halves, of_halves)
        case ("f64",):
            return lanewise(ins, "f64", ("f64",) * 3, lambda a, b, c: fused_double(a, b, c, mode))
    return Half(form.type).step(ins, 3, lambda a, b, c: odd_sum(a * b, c), form.flags)


def _single(form: Form, mode: str, size: int | None) -> Function:
    """Fused multiply-add of fp32 arrays of this size, or of any."""
    if mode == "rn" and not {"ftz", "sat"} & form.flags:
        return _nearest(size) if size else _nearest_of_any
    ftz, sat = "ftz" in form.flags, "sat" in form.flags

    def fused(a: Array, b: Array, c: Array) -> Array:
        if ftz:
            a, b, c = flushed(a), flushed(b), flushed(c)
        result = fused_single(a, b, c, mode)
        if ftz:
            result = flushed(result)
        return saturated(result) if sat else canonical(result)

    return fused


def _of_halves(a: Array, b: Array, c: Array) -> Array:
    """fp32 a b + c to nearest, for a and b that are fp16 or bf16 numbers.

    Their product has 22 bits at most: where the fp64 sum is inexact, one summand is too small beside the
    other to bring it near the middle between two fp32 numbers, so rounding twice does no harm.
    """
    return canonical(to_single(a.astype(np.float64) * b.astype(np.float64) + c))


def fused_single(a: Array, b: Array, c: Array, mode: str) -> Array:
    """fp32 a b + c, rounded once."""
    product = a.astype(np.float64) * b.astype(np.float64)
    if mode == "rn":
        return to_single(odd_sum(product, c.astype(np.float64)))
    # rounding twice in one direction is rounding once
    return rounded(mode, lambda: to_single(product + c.astype(np.float64)))


def _nearest(lanes: int) -> Function:
    """fma.rn of fp32 arrays [lanes], as fp64 or fp32; storing the result to a register rounds it to fp32.

    Halfway between fp32 numbers, or beside a subnormal one, the last 28 bits of an fp64 number are zeros, as
    they are in every NaN that comes of fp32 numbers. A sum whose last 16 bits are not all zeros needs no
    care; most sums of numbers that are not short are such. Its buffers serve one thread at a time.
    """
    product, addend, total = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    lowest: Callable[[], bytes] = total.view(np.uint16)[::4].tobytes
    multiply, add = np.multiply, np.add

    def fused(a: Array, b: Array, c: Array) -> Array:
        product[...] = a
        addend[...] = b
        multiply(product, addend, product)
        addend[...] = c
        add(product, addend, total)
        if b"\0\0" in lowest() and _tail_matters(product, addend, total):
            return canonical(to_single(odd_sum(product, addend)))
        return total

    return fused


def _nearest_of_any(a: Array, b: Array, c: Array) -> Array:
    """The same of arrays of any shapes that broadcast."""
    product, addend = np.multiply(a, b, dtype=np.float64), c.astype(np.float64)
    total = product + addend
    if not total.view(np.uint16)[..., ::4].all() and _tail_matters(product, addend, total):
        return canonical(to_single(odd_sum(product, addend)))
    return total


_LAST_29, _HALF = np.int64(0x1FFFFFFF), np.int64(0x10000000)


def _tail_matters(product: Array, addend: Array, total: Array) -> bool:
    """True if rounding product + addend, fp64, to fp32 by way of `total` can go wrong: not if no sum is
    subnormal or NaN in fp32, and those halfway between fp32 numbers are exact."""
    narrow = to_single(total)
    if single(narrow).any_nan_or_subnormal(narrow):
        return True
    halfway = (total.view(np.int64) & _LAST_29) == _HALF
    if not np.count_nonzero(halfway):
        return False
    back = total - product  # the error of a sum, exactly (Knuth)
    error = (product - (total - back)) + (addend - back)
    return bool(np.count_nonzero(halfway & (error != 0)))


# --- fp64 ---------------------------------------------------------------------------------------------------


def fused_double(a: Array, b: Array, c: Array, mode: str) -> Array:
    """fp64 a b + c, rounded once; lane by lane in rational numbers, which is slow."""
    plain = rounded(mode, lambda: a * b + c)
    result = np.where(np.isfinite(a) & np.isfinite(b) & ~np.isfinite(c), c, plain)
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
        if exact:  # the sign of an exact zero is that of the plain sum
            result[lane] = rounded_fraction(exact, mode)
    return result


def rounded_fraction(exact: Fraction, mode: str) -> float:
    """The fp64 number that a rational one rounds to."""
    try:
        nearest = float(exact)
    except OverflowError:
        nearest = math.inf if exact > 0 else -math.inf
    low, high = {"rn": (False, False), "rm": (True, False), "rp": (False, True)}.get(
        mode, (exact > 0, exact < 0)
    )
    if low and (nearest == math.inf or nearest > exact):
        return math.nextafter(nearest, -math.inf)
    if high and (nearest == -math.inf or nearest < exact):
        return math.nextafter(nearest, math.inf)
    return nearest
