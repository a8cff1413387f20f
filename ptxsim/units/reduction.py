"""Reductions that asynchronous copies make on arrival: cp.reduce.async.bulk and cp.reduce.async.bulk.tensor.

PTX ISA "cp.reduce.async.bulk": floating-point add rounds to nearest even; add.f32 "flushes subnormal inputs
and results to sign-preserving zero", f16 and bf16 keep them. inc and dec wrap within [0, operand], as those
of atom do. min and max of a NaN and a number give the number, as the instructions min and max do (the ISA
does not say it of reductions).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import unmodelled
from ptxsim.units.numbers import decode, encode

Array = NDArray[Any]

LEGAL = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
"""Types by operation, for a destination in global memory."""
_DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.uint16, "bf16": np.uint16}
DTYPES: dict[str, np.dtype[Any]] = {type: np.dtype(dtype) for type, dtype in _DTYPES.items()} | {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
    for kind in "usb"
    for bits in (32, 64)
}
_INTEGER = {"add": np.add, "min": np.minimum, "max": np.maximum}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_FLOAT = {"add": np.add, "min": np.fmin, "max": np.fmax}


def reduce(operation: str, type: str, old: Array, new: Array) -> Array:
    """Contents of memory after `new` arrived on `old`: arrays of one shape and of DTYPES[type] (raw uint16
    for f16 and bf16). Raises UnsupportedError for a combination that LEGAL does not have."""
    if type not in LEGAL.get(operation, ()):
        raise unmodelled(
            f"reduction .{operation} of {type}", f".{operation} of {', '.join(LEGAL.get(operation, ()))}"
        )
    if operation in _BITWISE:
        return _BITWISE[operation](old, new)
    if operation == "inc":
        return np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1))
    if operation == "dec":
        return np.where((old == 0) | (old > new), new, old - old.dtype.type(1))
    if type in ("f16", "bf16"):
        return encode(type, _FLOAT[operation](decode(type, old), decode(type, new)))
    if type == "f32":
        return _flushed(_flushed(old) + _flushed(new))
    return (_FLOAT if type == "f64" else _INTEGER)[operation](old, new)


def _flushed(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Subnormal numbers as zeros of the same sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)
