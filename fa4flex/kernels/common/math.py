"""Scalar operations that generated hooks call: plain functions, inlined while a kernel is traced.

Integers are Int32, or Int64 where the generator chose wide indices; numbers are Float32, booleans Boolean.
`//` and `%` floor as in Python. Results equal `fa4flex.codegen.evaluate` at float32, to the accuracy of the
hardware's approximations: about 2^-11 relative for `tanh` (tanh.approx.f32), 2 units in the last place else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4flex.kernels.common.ahead import HeldTable

Value = Any

INFINITY = float("inf")
NAN = float("nan")

FAST = True
"""True if hardware approximations are used. A CPU has none, and there `fastmath` makes the result of an
infinite operand undefined, which a GPU's instructions do not: tests that run hooks on a CPU clear it."""


# --- choosing -------------------------------------------------------------------------------------------


def where(condition: Value, yes: Value, no: Value) -> Value:
    """yes where the condition holds, else no; both of the same type, or one a Python number."""
    if isinstance(condition, bool):
        return yes if condition else no
    like = type(no) if isinstance(yes, (bool, int, float)) else type(yes)
    if like in (bool, int, float):
        like = {bool: Boolean, int: Int32, float: Float32}[like]
    return like(cutlass.select_(condition, like(yes), like(no)))


def minimum(a: Value, b: Value) -> Value:
    return cutlass.min(a, b)


def maximum(a: Value, b: Value) -> Value:
    return cutlass.max(a, b)


def absolute(x: Value) -> Value:
    return cute.math.abs(x)


def sign(x: Value) -> Value:
    """-1, 0 or 1, of the type of x."""
    like = type(x)
    return where(x > 0, like(1), where(x < 0, like(-1), like(0)))


def signum(x: Value) -> Value:
    """-1.0 or 1.0, also for zeros."""
    return cute.math.copysign(Float32(1.0), x)


# --- folding --------------------------------------------------------------------------------------------


def sum_of(terms: list[Value]) -> Value:
    return reduce(operator.add, terms)


def product_of(terms: list[Value]) -> Value:
    return reduce(operator.mul, terms)


def largest(terms: list[Value]) -> Value:
    return reduce(maximum, terms)


def smallest(terms: list[Value]) -> Value:
    return reduce(minimum, terms)


def any_of(terms: list[Value]) -> Value:
    return reduce(operator.or_, terms)


def all_of(terms: list[Value]) -> Value:
    return reduce(operator.and_, terms)


@cute.jit
def _looped(
    term: cutlass.Constexpr, extent: cutlass.Constexpr, first: Value, fold: cutlass.Constexpr
) -> Value:
    total = first
    for i in cutlass.range(extent, unroll=1):
        total = fold(total, term(i))
    return total


def fold_over(term: Callable[[Value], Value], extent: int, how: str, like: type) -> Value:
    """Fold by `how` ("sum", "prod", "max", "min", "any", "all") of term(0) to term(extent - 1), all of type
    `like`, by a loop."""
    fold, first = way(how, like)
    return _looped(term, extent, like(first), fold)


def way(how: str, like: type) -> tuple[Callable[[Value, Value], Value], Value]:
    """Function that folds two values of a type, and the value to begin with."""
    least: Value = -INFINITY
    most: Value = INFINITY
    if like in (Int32, Int64):
        least = -(1 << (31 if like is Int32 else 63))
        most = -1 - least
    return {
        "sum": (operator.add, 0), "prod": (operator.mul, 1), "max": (maximum, least), "min": (minimum, most),
        "any": (operator.or_, 0), "all": (operator.and_, 1),
    }[how]  # fmt: skip


# --- integers -------------------------------------------------------------------------------------------


class Divisor(NamedTuple):
    """A run-time divisor prepared for `divided`: |value| as a multiplication and a shift."""

    sign: Value  # -1 where negative, else 0
    multiplier: Value
    shift: Value


def divisor(value: Value) -> Divisor:
    """Prepare an Int32 other than 0: one 64-bit division, so that each use is a multiplication.

    With l = ceil(log2 d) and m = ceil(2^(31 + l) / d), which fits in 32 bits, n // d = (n * m) >> (31 + l)
    for 0 <= n < 2^31 (Granlund and Montgomery, Division by Invariant Integers, PLDI 1994, theorem 4.2).
    """
    magnitude = maximum(cute.math.abs(value), Int32(1))
    rest, bits = magnitude - 1, Int32(0)
    for step in (16, 8, 4, 2, 1):
        large = (rest >> step) != 0
        bits = bits + where(large, Int32(step), Int32(0))
        rest = where(large, rest >> step, rest)
    bits = bits + where(rest != 0, Int32(1), Int32(0))
    wide = Uint64(Uint32(magnitude))
    shift = Uint64(Uint32(bits)) + Uint64(31)
    multiplier = ((Uint64(1) << shift) + wide - Uint64(1)) // wide
    return Divisor(value >> 31, Uint32(multiplier), shift)


def divided(x: Value, by: Divisor) -> Value:
    """x // d for an Int32 x, where `by` is divisor(d)."""
    signed = (x ^ by.sign) - by.sign
    flip = signed >> 31
    product = Uint64(Uint32(signed ^ flip)) * Uint64(by.multiplier)
    return Int32(Uint32(product >> by.shift)) ^ flip


def floor_div(x: Value, d: Value) -> Value:
    """x // d, rounded down."""
    x, d = _number(x), _number(d)
    # The compiler takes x // -3 for an unsigned division where it knows x >= 0: no such divisor here.
    if isinstance(d, int):
        return x // d if d > 0 else -x // -d
    negative = d < 0
    return where(negative, -x, x) // where(negative, -d, d)


def _number(x: Value) -> Value:
    """x as a plain integer: what is computed from a tensor's extent stays an extent to the compiler, also as
    an Int32, and extents divide towards zero. No instruction comes of it."""
    return x if isinstance(x, int) else x | 0


def natural_div(x: Value, d: int) -> Value:
    """x // d for x >= 0 and a constant d > 0: no sign to fix, so a multiplication and a shift."""
    if isinstance(x, Int64):
        return Int64(Uint64(x) // Uint64(d))
    return Int32(Uint32(x) // Uint32(d))


def trunc_div(x: Value, d: Value) -> Value:
    """x / d, rounded towards zero."""
    quotient = cute.math.abs(x) // cute.math.abs(d)
    return where((x ^ d) < 0, -quotient, quotient)


# --- captured tensors -----------------------------------------------------------------------------------


def wrapped(i: Value, table: Value, dimension: int) -> Value:
    """An index as torch reads it: a negative one counts from the end."""
    return where(i < 0, i + table.shape[dimension], i)


def confined(i: Value, table: Value, dimension: int) -> Value:
    """An index that memory holds, as torch reads it; what lies outside of the tensor becomes its end."""
    return maximum(minimum(wrapped(i, table, dimension), table.shape[dimension] - 1), 0)


Index = tuple[Value, ...]
Steps = tuple[int, ...]
Order = tuple[int, ...]


def _element(table: Value, index: Index, guard: bool, steps: Steps, even: bool, order: Order) -> Value:
    """The element at index + steps.

    even: the last of `index` is even, and only there is a step: neighbours may be loaded at once.
    guard: clamp into the tensor, so that what lies past a sequence's end reads some element of it.
    order: the dimensions, those first whose index changes least often; () where they are in that order.
    """
    if isinstance(table, HeldTable):
        return table.element(lambda x, pairs: _element(x, index, guard, steps, even and pairs, order))
    if guard:
        # No sums of addresses here: where a thread has many rows, they would be kept for each of them.
        shape, whole = table.shape, index
        if steps:
            whole = tuple(i + step for i, step in zip(index, steps, strict=True))
        return table[tuple(maximum(minimum(i, shape[d] - 1), 0) for d, i in enumerate(whole))]
    strides = table.stride if isinstance(table.stride, tuple) else (table.stride,)
    if not steps:
        # One addition of a dimension after the other: what a row or a head adds is added once for all of its
        # elements. A sum of all of them would be made anew, in 64 bits, for each.
        place = table.iterator
        for d in order or range(len(index)):
            place = _beyond(place, index[d], strides[d])
        return place.load()
    # The address of `index` is the same for all elements of a tile; what a step adds to it is a constant.
    # Added to the index instead, a step would take part in 32-bit arithmetic, anew for each element.
    if even:
        index = (*index[:-1], cute.assume(index[-1], divby=2))
    place = table.iterator + cute.crd2idx(index, table.layout)
    if even and _is_one(strides[-1]) and _is_aligned(place, 2):
        # Both neighbours are loaded for each; the compiler drops the second of two equal loads.
        return _of_pair(place + (steps[-1] - steps[-1] % 2), steps[-1] % 2)
    jumps = [step * stride for step, stride in zip(steps, strides, strict=True) if step]
    return (place + sum(jumps)).load()


def _beyond(place: Value, i: Value, stride: Value) -> Value:
    """place + i * stride, in 64 bits where the stride is known only at run time."""
    if isinstance(stride, int) or isinstance(i, Int64):
        return place + i * stride
    # In bytes, so that the product is added to the address as it is.
    size = place.dtype.width // 8
    address = place.toint() + Int64(i) * (Int64(stride) * size)
    return cute.make_ptr(place.dtype, address, place.memspace, assumed_align=size)


def _of_pair(place: Value, which: int) -> Value:
    """Element 0 or 1 of two that are one aligned word."""
    if place.dtype is BFloat16:
        # A bfloat16 is the upper half of a Float32: one operation takes it out of the word.
        word = cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(1))[0]
        return (word & -65536 if which else word << 16).bitcast(Float32)
    return cute.make_tensor(place, cute.make_layout(2)).load()[which]


def _is_one(stride: Value) -> bool:
    return isinstance(stride, int) and stride == 1


def _is_aligned(place: Value, elements: int) -> bool:
    """True if the type of a pointer says that its address is a multiple of so many elements: it does where a
    launch promises that of the tensor's address and of all its strides but the last."""
    return place.alignment % (elements * place.dtype.width // 8) == 0


def load_float(
    table: Value, index: Index, guard: bool, steps: Steps = (), even: bool = False, order: Order = ()
) -> Value:
    """An element as Float32, from any dtype. Where `steps` is given, the one at index + steps;
    `even` promises that the last of `index` is even, so that neighbours may be loaded at once. `order` are
    the dimensions from the one on whose index changes least often; absent: they are in that order."""
    return Float32(_element(table, index, guard, steps, even, order))


def load_int(
    table: Value, index: Index, guard: bool, steps: Steps = (), even: bool = False, order: Order = ()
) -> Value:
    """An element of an integer tensor as Int32; of an int64 tensor, its low 32 bits."""
    return Int32(_element(table, index, guard, steps, even, order))


def load_wide(
    table: Value, index: Index, guard: bool, steps: Steps = (), even: bool = False, order: Order = ()
) -> Value:
    """An element of an integer tensor as Int64."""
    return Int64(_element(table, index, guard, steps, even, order))


def load_bool(
    table: Value, index: Index, guard: bool, steps: Steps = (), even: bool = False, order: Order = ()
) -> Value:
    """An element of a bool tensor, which the launch passes as uint8 (0 or 1)."""
    element = _element(table, index, guard, steps, even, order)
    return element if isinstance(element, Boolean) else element != 0


@cute.jit
def _bisect(table: cute.Tensor, lead: tuple[Value, ...], needle: Value, upper: cutlass.Constexpr) -> Int32:
    low, high = Int32(0), Int32(table.shape[len(lead)])
    while low < high:
        middle = (low + high) >> 1
        element = table[(*lead, middle)]
        if cutlass.const_expr(upper):
            before = element <= needle
        else:
            before = element < needle
        if before:
            low = middle + 1
        else:
            high = middle
    return low


def search_left(table: Value, lead: tuple[Value, ...], needle: Value, guard: bool) -> Value:
    """Number of elements of the sorted vector table[lead] that are < needle."""
    return _bisect(table, _clamped(table, lead, guard), needle, False)


def search_right(table: Value, lead: tuple[Value, ...], needle: Value, guard: bool) -> Value:
    """Number of elements of the sorted vector table[lead] that are <= needle."""
    return _bisect(table, _clamped(table, lead, guard), needle, True)


def _clamped(table: Value, lead: tuple[Value, ...], guard: bool) -> tuple[Value, ...]:
    if not guard:
        return lead
    return tuple(maximum(minimum(i, table.shape[d] - 1), 0) for d, i in enumerate(lead))


# --- floats ---------------------------------------------------------------------------------------------


def reciprocal(x: Value) -> Value:
    return Float32(1.0) / x


def divide(x: Value, y: Value) -> Value:
    """x / y for each score: an approximate reciprocal, within 2 units in the last place."""
    return x * cute.arch.rcp_approx(y) if FAST else x / y


def saturated(x: Value, factor: Value, addend: Value) -> Value:
    """x * factor + addend, rounded once, where it is within [0, 1]; else the nearer end. Of no number, 0."""
    x, factor, addend = Float32(x), Float32(factor), Float32(addend)
    if FAST:
        return _fma_saturated(x, factor, addend)
    product = cute.math.fma(x, factor, addend)
    return where(product > 0.0, where(product < 1.0, product, 1.0), 0.0)


@dsl_user_op
def _fma_saturated(x: Float32, y: Float32, z: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [a.ir_value(loc=loc, ip=ip) for a in (x, y, z)],
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def exact_ratio(x: Value, y: Value) -> Value:
    """x / y, correctly rounded: a quotient that is a whole number is that number."""
    return Float32(x) / Float32(y)


def floor_quotient(x: Value, y: Value) -> Value:
    """x // y of floats, as torch has it: of the exact quotient, not of the rounded one."""
    times, rest = _floored(x, y)
    return where(Float32(y) == 0.0, exact_ratio(x, y), where(rest == rest, times, rest))


def remainder(x: Value, y: Value) -> Value:
    """x % y of floats, of the sign of y."""
    return _floored(x, y)[1]


def _floored(x: Value, y: Value) -> tuple[Value, Value]:
    """x // y and x % y, for quotients up to 2^24, of which the rounded one is at most one away."""
    x, y = Float32(x), Float32(y)
    times = cute.math.trunc(x / y)
    rest = where(times == 0.0, x, cute.math.fma(-times, y, x))  # where y is infinite, 0 * y would be NaN
    below = where(y < 0.0, rest > 0.0, rest < 0.0)
    return where(below, times - 1.0, times), where(below, rest + y, rest)


def tanh(x: Value) -> Value:
    return cute.math.tanh(x, fastmath=FAST)


def exp2(x: Value) -> Value:
    return cute.math.exp2(x, fastmath=FAST)


def log2(x: Value) -> Value:
    return cute.math.log2(x, fastmath=FAST)


def sqrt(x: Value) -> Value:
    return cute.math.sqrt(x, fastmath=FAST)


_ERF_NEAR = (0.128379121, -0.37612325, 0.112801798, -0.0267113112, 0.00491755176, -0.000563142356)
_ERF_FAR = (0.00385447964, 1.61212289, 0.944228113, 0.127871975, -0.0213202853, 0.00165970344)
"""fp32 coefficients of least error (Lawson's algorithm: iterated weighted least squares), lowest power
first: erf(x) / x - 1 in powers of x^2 on [0, 1], to 4e-8 of erf(x), and -log2(1 - erf(x)) in powers of x on
[1, 4], to 2e-8 in the result."""


def erf(x: Value) -> Value:
    """The error function: x + x p(x^2) below 1 in size, 1 - 2^-r(|x|) above it.

    Both are computed and one is taken, which is less than a branch costs, or a choice of every coefficient.
    Beyond 4, r goes on to rise, and 2^-r is lost in the 1.
    """
    size = cute.math.abs(x)
    near = _polynomial(_ERF_NEAR, x * x) * x + x
    far = cute.math.copysign(1.0 - exp2(-_polynomial(_ERF_FAR, size)), x)
    return where(size < 1.0, near, far)


def _polynomial(coefficients: tuple[float, ...], x: Value) -> Value:
    """The sum of coefficients[i] x^i, by Horner's scheme."""
    *rest, total = coefficients
    for coefficient in reversed(rest):
        total = total * x + coefficient
    return total


def power(x: Value, y: Value) -> Value:
    return cute.math.pow(x, y)


def rounded(x: Value) -> Value:
    """To the nearest integer, halves to even."""
    return cute.math.roundeven(x)


def is_nan(x: Value) -> Value:
    return x != x


def is_inf(x: Value) -> Value:
    return cute.math.abs(x) == INFINITY


def to_float16(x: Value) -> Value:
    """x rounded to float16."""
    return x.to(Float16).to(Float32)


def to_bfloat16(x: Value) -> Value:
    """x rounded to bfloat16."""
    return x.to(BFloat16).to(Float32)


floor, ceil, trunc = cute.math.floor, cute.math.ceil, cute.math.trunc
sin, cos, tan = cute.math.sin, cute.math.cos, cute.math.tan
asin, acos, atan, atan2 = cute.math.asin, cute.math.acos, cute.math.atan, cute.math.atan2
sinh, cosh, expm1, log1p = cute.math.sinh, cute.math.cosh, cute.math.expm1, cute.math.log1p
