"""Rounding directions, signalling values and flushing: what floating-point instructions share.

Directed rounding (.rz .rm .rp) sets the processor's own direction around one numpy call, through the C
function fesetround. IEEE 754 then fixes every bit, subnormal results and the signs of zeros included.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.errors import UnsupportedError
from ptxsim.isa.operands import Array

ROUNDINGS = ("rn", "rz", "rm", "rp")
_DIRECTIONS = {
    "x86_64": {"rm": 0x400, "rp": 0x800, "rz": 0xC00},
    "aarch64": {"rp": 0x400000, "rm": 0x800000, "rz": 0xC00000},
}
_DIRECTION = _DIRECTIONS.get(platform.machine(), {})
_fesetround: Any = ctypes.CDLL(None).fesetround

SMALLEST_NORMAL = np.float32(2.0**-126)
NAN32 = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]
"""The NaN that single-precision instructions give. The ISA leaves its bits open (9.7.3); Hopper's are
these."""
NAN64 = np.array(0x7FFFFFFF << 32, np.uint64).view(np.float64)[()]
"""The canonical NaN of rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 (9.7.3.14, 9.7.3.17)."""


def rounded(mode: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """function(*arrays), computed while the processor rounds as `mode` says."""
    if mode == "rn":
        return function(*arrays)
    if mode not in _DIRECTION:
        raise UnsupportedError(
            f"directed rounding on {platform.machine()}",
            f"a processor among {', '.join(_DIRECTIONS)}",
            "run the simulator there",
        )
    _fesetround(_DIRECTION[mode])
    try:
        return function(*arrays)
    finally:
        _fesetround(0)


def odd_sum(x: Array, y: Array) -> Array:
    """x + y in fp64, rounded to odd where it is inexact: rounding this again to 51 bits or fewer, in any
    direction, gives what rounding the exact sum gives (Boldo and Melquiond 2008)."""
    return _odd(rounded("rm", np.add, x, y), rounded("rp", np.add, x, y))


def odd_float(integers: Array) -> Array:
    """64-bit integers in fp64, rounded to odd."""
    return _odd(rounded("rm", _to_double, integers), rounded("rp", _to_double, integers))


def _odd(below: Array, above: Array) -> Array:
    # where both are zero the sum was exact, and rounding to nearest gives what rounding up does: +0 for x - x
    return np.where((below != above) & (below.view(np.int64) & 1 == 1), below, above)


def _to_double(values: Array) -> Array:
    return values.astype(np.float64)


def to_single(values: Array) -> Array:
    """fp64 to fp32, in the processor's direction."""
    return values.astype(np.float32)


# --- tests of all lanes at once -----------------------------------------------------------------------------
# A warp's register is one Python integer of 1024 bits, and adding a constant to every lane carries into a
# lane's sign bit where its magnitude is large enough. That takes half the time of the cheapest numpy
# comparison.


def _every(pattern: int, lanes: int) -> int:
    return int.from_bytes(pattern.to_bytes(4, "little") * lanes, "little")


class Single:
    """Tests of fp32 values [lanes] without a numpy call. `lanes` is 32, or 64 for f32x2."""

    def __init__(self, lanes: int) -> None:
        self.magnitude = _every(0x7FFFFFFF, lanes)
        self.signs = _every(0x80000000, lanes)
        self.above_infinity = _every(0x007FFFFF, lanes)
        self.at_least_normal = _every(0x7F800000, lanes)

    def any_nan(self, values: Array) -> bool:
        bits = int.from_bytes(values.tobytes(), "little") & self.magnitude
        return bits + self.above_infinity & self.signs != 0

    def any_nan_or_subnormal(self, values: Array) -> bool:
        bits = int.from_bytes(values.tobytes(), "little") & self.magnitude
        subnormal = (bits + self.magnitude) & ~(bits + self.at_least_normal)
        return (bits + self.above_infinity | subnormal) & self.signs != 0

    def any_nan_or_zero(self, values: Array) -> bool:
        bits = int.from_bytes(values.tobytes(), "little") & self.magnitude
        return (bits + self.above_infinity | ~(bits + self.magnitude)) & self.signs != 0


SINGLE = {lanes: Single(lanes) for lanes in (32, 64)}


class Many:
    """The same of any number of fp32 values, with numpy calls. May also say yes for zeros."""

    def any_nan(self, values: Array) -> bool:
        return bool(np.count_nonzero(values != values))

    def any_nan_or_subnormal(self, values: Array) -> bool:
        # One comparison of the bits' magnitudes less that of the smallest normal number: zeros and
        # subnormals wrap around to above infinity.
        bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
        return bool(np.count_nonzero(bits - np.uint32(0x00800000) > np.uint32(0x7F000000)))

    any_nan_or_zero = any_nan_or_subnormal


MANY = Many()


def single(values: Array) -> Single | Many:
    """Quickest tests for this many values."""
    return SINGLE.get(values.size, MANY)


def canonical(values: Array) -> Array:
    """fp32 with every NaN replaced by the one that the hardware gives."""
    return np.where(values != values, NAN32, values) if single(values).any_nan(values) else values


def flushed(values: Array, smallest: Any = SMALLEST_NORMAL) -> Array:
    """.ftz: subnormals, which are less than `smallest`, become zeros of their sign."""
    return np.where(np.abs(values) < smallest, np.copysign(values.dtype.type(0), values), values)


def saturated(values: Array) -> Array:
    """.sat: within [0, 1], and +0 for NaN."""
    return np.fmin(np.fmax(values, values.dtype.type(0)), values.dtype.type(1)) + values.dtype.type(0)


def rectified(values: Array) -> Array:
    """.relu: +0 for what is not positive; NaN stays."""
    return np.where(values <= 0, values.dtype.type(0), values)
