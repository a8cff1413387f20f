"""The range of each operation, given the ranges of its arguments.

Ends are Python numbers, or tensors that broadcast over the boxes; those of integers and bools may be formulas
as well, from which a device computes them. With Python ends, integers are exact at any size; with tensors
they are int64. Float ends are float64 tensors, and enclose the results of
computation at float32 and at float64 alike: add, sub, mul, div are correctly rounded, hence monotone, so
rounding the ends to both precisions is exact; other functions are widened by their error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from operator import floordiv, or_
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.expr import Expr
from fa4flex.codegen.formula import Formula
from fa4flex.codegen.ops import OPS

Value = Any  # a Python number, a tensor over boxes, or a formula


@dataclass(frozen=True, slots=True)
class Bounds:
    """Every value is in [lo, hi], or NaN if `nan`. Of a bool: lo = certainly true, hi = possibly true."""

    lo: Value
    hi: Value
    nan: Value = False


ANY_INT = Bounds(-(1 << 70), 1 << 70)
"""An integer nothing is known of. Too wide for int64, so it only ever appears with Python ends."""
VAGUE = 1 << 70
"""Conversions of floats and left shifts that get here may go further."""
UNSURE = Bounds(False, True)
_INF = float("inf")
_WIDEST_LEFT, _WIDEST_RIGHT = 128, 1 << 32
"""Shifts are exact up to here. Shifted further left, any number but 0 is VAGUE or more."""


def any_float() -> Bounds:
    """A float of which nothing is known."""
    infinity = torch.tensor(_INF, dtype=torch.float64)
    return Bounds(-infinity, infinity, True)


def of_dtype(dtype: torch.dtype) -> Bounds:
    """Integers of a dtype."""
    limits = torch.iinfo(dtype)
    return Bounds(limits.min, limits.max)


def of_captured(node: Expr, integers: Bounds, longest: int) -> Bounds:
    """A captured number, an element, or a position in a vector of at most `longest`, whatever is captured."""
    if node.kind == "float":
        return any_float()
    if node.kind == "bool":
        return UNSURE
    return Bounds(0, longest) if node.op == "search" else integers


# --- arithmetic on ends: Python numbers, tensors or formulas ----------------------------------------------


def least(a: Value, b: Value) -> Value:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    if isinstance(b, Tensor):
        return b.clamp(max=a)
    return a.minimum(b) if isinstance(a, Formula) else min(a, b)


def greatest(a: Value, b: Value) -> Value:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return a.maximum(b) if isinstance(a, Formula) else max(a, b)


def choose(c: Value, a: Value, b: Value) -> Value:
    if isinstance(c, Formula):
        return c.where(a, b)
    return torch.where(c, a, b) if isinstance(c, Tensor) else a if c else b


def negate(c: Value) -> Value:
    return ~c if isinstance(c, (Tensor, Formula)) else not c


def real(x: Value) -> Tensor:
    return x.double() if isinstance(x, Tensor) else torch.tensor(_nearest(x), dtype=torch.float64)


def _nearest(x: float) -> float:
    try:
        return float(x)
    except OverflowError:  # an int beyond the largest float
        return _INF if x > 0 else -_INF


def _hull(*values: Value) -> tuple[Value, Value]:
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = least(lo, value), greatest(hi, value)
    return lo, hi


# --- rules for integers -----------------------------------------------------------------------------------


def _monotone(function: Callable[..., Value]) -> Callable[..., Bounds]:
    """For functions that rise in all arguments and round nothing."""
    return lambda *xs: Bounds(
        function(*(x.lo for x in xs)), function(*(x.hi for x in xs)), reduce(or_, (x.nan for x in xs))
    )


def _int_mul(a: Bounds, b: Bounds) -> Bounds:
    if a is b:
        squares = _int_abs(a)
        return Bounds(squares.lo * squares.lo, squares.hi * squares.hi)
    return Bounds(*_hull(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi))


def _int_abs(a: Bounds) -> Bounds:
    return Bounds(greatest(greatest(a.lo, -a.hi), 0), greatest(-a.lo, a.hi))


def _trunc_ratio(a: Value, b: Value) -> Value:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a >= 0) == (b > 0) else -1)


def _int_division(ratio: Callable[[Value, Value], Value]) -> Callable[[Bounds, Bounds], Bounds]:
    """Quotients are extreme at corners while the divisor keeps its sign; else they are within |a| of 0."""

    def rule(a: Bounds, b: Bounds) -> Bounds:
        through_zero = (b.lo <= 0) & (b.hi >= 0)
        divisors = [choose(through_zero, 1, end) for end in ([b.lo] if b.lo is b.hi else [b.lo, b.hi])]
        lo, hi = _hull(*(ratio(x, m) for x in (a.lo, a.hi) for m in divisors))
        size = greatest(-a.lo, a.hi)
        return Bounds(choose(through_zero, -size, lo), choose(through_zero, size, hi))

    return rule


def _int_mod(a: Bounds, b: Bounds) -> Bounds:
    """Within one period of a fixed divisor the remainder rises with `a`; else it is any remainder."""
    m = choose(b.lo == 0, 1, b.lo)
    period = a.lo // m
    same = (period == a.hi // m) & (b.lo == b.hi) & (b.lo != 0)
    below, above = least(b.lo + 1, 0), greatest(b.hi - 1, 0)
    return Bounds(choose(same, a.lo - period * m, below), choose(same, a.hi - period * m, above))


def _smear(x: Value) -> Value:
    """All bits at and below the highest set bit of a non-negative number."""
    if not isinstance(x, Tensor):
        return (1 << x.bit_length()) - 1
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _bitwise(op: str) -> Callable[[Bounds, Bounds], Bounds]:
    """Bits above the highest one that differs between lo and hi are fixed; below it they are unknown."""

    def rule(a: Bounds, b: Bounds) -> Bounds:
        mixed = ((a.lo < 0) & (a.hi >= 0)) | ((b.lo < 0) & (b.hi >= 0))
        loose_a, loose_b = (_smear(choose(mixed, 0, x.lo ^ x.hi)) for x in (a, b))
        low_a, low_b = a.lo & ~loose_a, b.lo & ~loose_b
        high_a, high_b = a.lo | loose_a, b.lo | loose_b
        if op == "bitand":
            lo, hi = low_a & low_b, high_a & high_b
        elif op == "bitor":
            lo, hi = low_a | low_b, high_a | high_b
        else:
            loose = loose_a | loose_b
            lo = (a.lo ^ b.lo) & ~loose
            hi = lo | loose
        # With a sign unknown, all that is known is how many bits there are.
        size = _smear(greatest(greatest(~a.lo, a.hi), greatest(~b.lo, b.hi)))
        return Bounds(choose(mixed, ~size, lo), choose(mixed, size, hi))

    return rule


def _shift(name: str) -> Callable[[Bounds, Bounds], Bounds]:
    """Extreme at corners. As in torch, a negative shift loses all bits, as too wide a one does."""
    left = name == "shl"
    widest = _WIDEST_LEFT if left else _WIDEST_RIGHT

    def shifted(x: Value, step: Value) -> Value:
        return x << step if left else x >> step

    def rule(a: Bounds, s: Bounds) -> Bounds:
        steps = [greatest(least(end, widest), 0) for end in (s.lo, s.hi)]
        lo, hi = _hull(*(shifted(x, step) for x in (a.lo, a.hi) for step in steps))
        negative = s.lo < 0
        lost = (0, 0) if left else (choose(a.lo < 0, -1, 0), choose(a.hi < 0, -1, 0))
        return Bounds(choose(negative, least(lo, lost[0]), lo), choose(negative, greatest(hi, lost[1]), hi))

    return rule


# --- rules for floats -------------------------------------------------------------------------------------


def _undefined_as_anything(lo: Tensor, hi: Tensor, nan: Value) -> Bounds:
    broken = lo.isnan() | hi.isnan()
    return Bounds(torch.where(broken, -_INF, lo), torch.where(broken, _INF, hi), broken | nan)


def rounded(lo: Tensor, hi: Tensor, nan: Value = False) -> Bounds:
    """Encloses correctly rounded results at float32 and at float64."""
    return _undefined_as_anything(least(lo, lo.float().double()), greatest(hi, hi.float().double()), nan)


def _widened(lo: Tensor, hi: Tensor, nan: Value) -> Bounds:
    """Encloses float32 results that are several units in the last place away, subnormals flushed or not."""
    return rounded(lo - lo.abs() * 2.0**-20 - 2.0**-120, hi + hi.abs() * 2.0**-20 + 2.0**-120, nan)


def _unbounded(*xs: Bounds) -> Value:
    """True if NaN may come out of inf - inf or 0 * inf: an infinity may enter."""
    nan: Value = False
    for x in xs:
        nan = nan | x.nan | x.lo.isinf() | x.hi.isinf()
    return nan


def _corners(function: Callable[[Value, Value], Value], a: Bounds, b: Bounds) -> tuple[Value, Value]:
    return _hull(*(function(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)))


def _float_mul(a: Bounds, b: Bounds) -> Bounds:
    if a is b:
        a = b = _float_abs(a)
    return rounded(*_corners(torch.mul, a, b), _unbounded(a, b))


def _float_div(a: Bounds, b: Bounds) -> Bounds:
    through_zero = (b.lo <= 0) & (b.hi >= 0)
    nowhere = torch.where(through_zero, torch.nan, 1.0)  # NaN ends mean that nothing is known
    lo, hi = _corners(torch.div, a, b)
    return rounded(lo * nowhere, hi * nowhere, _unbounded(a, b))


def _float_floordiv(a: Bounds, b: Bounds) -> Bounds:
    ratio = _float_div(a, b)  # torch corrects by a remainder, which may move the floor by one
    nowhere = _remainder_lost(ratio)
    return _undefined_as_anything(
        (ratio.lo + nowhere).floor() - 1, (ratio.hi + nowhere).floor() + 1, ratio.nan
    )


def _remainder_lost(ratio: Bounds) -> Tensor:
    """NaN where a quotient may have no fraction at float32: torch's remainder is then anything, even NaN."""
    lost = (ratio.lo < -(2.0**23)) | (ratio.hi > 2.0**23)
    return torch.where(lost, torch.nan, 0.0)


def _float_mod(a: Bounds, b: Bounds) -> Bounds:
    ratio = _float_div(a, b)
    nowhere = _remainder_lost(ratio)
    return _undefined_as_anything(b.lo.clamp(max=0.0) + nowhere, b.hi.clamp(min=0.0) + nowhere, ratio.nan)


def _float_pow(a: Bounds, b: Bounds) -> Bounds:
    nowhere = torch.where(a.lo > 0, 1.0, torch.nan)  # monotone in each argument for positive bases only
    lo, hi = _corners(torch.pow, a, b)
    return _widened(lo * nowhere, hi * nowhere, _unbounded(a, b))


def _float_abs(a: Bounds) -> Bounds:
    return Bounds(greatest(greatest(a.lo, -a.hi), 0.0), greatest(-a.lo, a.hi), a.nan)


def _float_sign(a: Bounds) -> Bounds:
    lo, hi = torch.sign(a.lo), torch.sign(a.hi)
    return Bounds(choose(a.nan, lo.clamp(max=0.0), lo), choose(a.nan, hi.clamp(min=0.0), hi), a.nan)


def _from_row(op: str) -> Callable[..., Bounds]:
    """The rule that the `range` of an operation's row states."""
    row = OPS[op]
    result = row.range
    assert result is not None, f"no range of {op}"
    low, high = result.low, result.high
    if result.shape == "within":
        return lambda *xs: Bounds(torch.tensor(low).double(), torch.tensor(high).double(), _unbounded(*xs))
    function, enclosed = getattr(torch, row.torch[0]), Bounds if result.exact else _widened

    def rule(a: Bounds) -> Bounds:
        a = _float_abs(a) if result.shape == "even" else a
        first, last = (a.hi, a.lo) if result.shape == "falling" else (a.lo, a.hi)
        nan = (a.lo < low) | (a.hi > high) | a.nan
        return enclosed(function(first.clamp(low, high)), function(last.clamp(low, high)), nan)

    return rule


# --- rules for truth, comparison and conversion -----------------------------------------------------------


def _not(a: Bounds) -> Bounds:
    return Bounds(negate(a.hi), negate(a.lo))


def _xor(a: Bounds, b: Bounds) -> Bounds:
    known = (a.lo == a.hi) & (b.lo == b.hi)
    value = a.lo ^ b.lo
    return Bounds(known & value, negate(known) | value)


def _eq(a: Bounds, b: Bounds) -> Bounds:
    points = (a.lo == a.hi) & (b.lo == b.hi) & negate(a.nan | b.nan)
    return Bounds(points & (a.lo == b.lo), (a.lo <= b.hi) & (b.lo <= a.hi))


def _eq_zero(d: Bounds) -> Bounds:
    return Bounds((d.lo == 0) & (d.hi == 0), (d.lo <= 0) & (d.hi >= 0))


SIGN_TESTS: dict[str, Callable[[Bounds], Bounds]] = {
    "lt": lambda d: Bounds(d.hi < 0, d.lo < 0),
    "le": lambda d: Bounds(d.hi <= 0, d.lo <= 0),
    "eq": _eq_zero,
    "ne": lambda d: _not(_eq_zero(d)),
}
"""Integer comparisons a ? b, given the range of a - b."""


def _where(c: Bounds, a: Bounds, b: Bounds) -> Bounds:
    lo = choose(c.lo, a.lo, choose(c.hi, least(a.lo, b.lo), b.lo))
    hi = choose(c.lo, a.hi, choose(c.hi, greatest(a.hi, b.hi), b.hi))
    return Bounds(lo, hi, a.nan | b.nan)


def _to_float(a: Bounds) -> Bounds:
    """An int is rounded once, or to float64 and then to float32: large ones may differ."""
    return rounded(least(real(a.lo), _single(a.lo)), greatest(real(a.hi), _single(a.hi)))


def _single(x: Value) -> Tensor:
    if not isinstance(x, Tensor) and -(1 << 63) <= x < 1 << 63:
        x = torch.tensor(x)
    return x.float().double() if isinstance(x, Tensor) else real(x)


def _float_to_int(a: Bounds) -> Bounds:
    wild = (a.lo < -(2.0**62)) | (a.hi > 2.0**62) | a.nan
    if wild.ndim == 0:
        return ANY_INT if bool(wild) else Bounds(int(a.lo), int(a.hi))
    # Wide ranges saturate here: over the whole problem such a node is ANY_INT, so its caller knows it.
    lo, hi = (x.nan_to_num(0.0).clamp(-(2.0**62), 2.0**62).to(torch.int64) for x in (a.lo, a.hi))
    return Bounds(torch.where(wild, -(1 << 62), lo), torch.where(wild, 1 << 62, hi))


def _number_to_bool(a: Bounds) -> Bounds:
    zero = (a.lo == 0) & (a.hi == 0) & negate(a.nan)
    return Bounds((a.lo > 0) | (a.hi < 0), negate(zero))


INT_RULES: dict[str, Callable[..., Bounds]] = {
    "add": lambda a, b: Bounds(a.lo + b.lo, a.hi + b.hi),
    "sub": lambda a, b: Bounds(a.lo - b.hi, a.hi - b.lo),
    "mul": _int_mul,
    "neg": lambda a: Bounds(-a.hi, -a.lo),
    "abs": _int_abs,
    "minimum": _monotone(least),
    "maximum": _monotone(greatest),
    "sign": _monotone(lambda x: torch.sign(x) if isinstance(x, Tensor) else (x > 0) - (x < 0)),
    "floordiv": _int_division(floordiv),
    "truncdiv": _int_division(_trunc_ratio),
    "mod": _int_mod,
    **{op: _bitwise(op) for op in ("bitand", "bitor", "bitxor")},
    "bitnot": lambda a: Bounds(~a.hi, ~a.lo),
    "shl": _shift("shl"),
    "shr": _shift("shr"),
    "to_float": _to_float,
    "to_bool": _number_to_bool,
}
FLOAT_RULES: dict[str, Callable[..., Bounds]] = {
    "add": lambda a, b: rounded(a.lo + b.lo, a.hi + b.hi, _unbounded(a, b)),
    "sub": lambda a, b: rounded(a.lo - b.hi, a.hi - b.lo, _unbounded(a, b)),
    "mul": _float_mul,
    "div": _float_div,
    "pow": _float_pow,
    "floordiv": _float_floordiv,
    "truncdiv": lambda a, b: _monotone(torch.trunc)(_float_div(a, b)),
    "mod": _float_mod,
    "neg": lambda a: Bounds(-a.hi, -a.lo, a.nan),
    "abs": _float_abs,
    "sign": _float_sign,
    "minimum": _monotone(least),
    "maximum": _monotone(greatest),
    "isnan": lambda a: Bounds(False, a.nan),
    "isinf": lambda a: Bounds(False, a.lo.isinf() | a.hi.isinf()),
    "to_int": _float_to_int,
    "to_bool": _number_to_bool,
    "detach": lambda a: a,
    "with_grad": lambda a, x, slope: a,
}
BOOL_RULES: dict[str, Callable[..., Bounds]] = {
    "and_": lambda a, b: Bounds(a.lo & b.lo, a.hi & b.hi),
    "or_": lambda a, b: Bounds(a.lo | b.lo, a.hi | b.hi),
    "xor": _xor,
    "not_": _not,
    "to_int": _monotone(lambda x: x.to(torch.int64) if isinstance(x, Tensor) else int(x)),
    "to_float": _to_float,
}
ANY_KIND_RULES: dict[str, Callable[..., Bounds]] = {
    "lt": lambda a, b: Bounds((a.hi < b.lo) & negate(a.nan | b.nan), a.lo < b.hi),
    "le": lambda a, b: Bounds((a.hi <= b.lo) & negate(a.nan | b.nan), a.lo <= b.hi),
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
    "where": _where,
}


RULES = {"int": INT_RULES, "float": FLOAT_RULES, "bool": BOOL_RULES}


@cache
def rule_for(op: str, kind: str) -> Callable[..., Bounds]:
    """The rule of `op` on arguments of `kind`."""
    return ANY_KIND_RULES.get(op) or RULES[kind].get(op) or _from_row(op)
