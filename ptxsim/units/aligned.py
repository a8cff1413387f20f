"""Products of 8-bit floats by Hopper's wgmma: D = A B^T + C, as the chip adds.

The PTX ISA leaves order and rounding open. On the chip the 32 products of an instruction and C are one sum:
each term is truncated to a multiple of 2**(E - 13), where E is the largest exponent among the terms, and the
exact sum is truncated to 13 fraction bits. The exponent of a product is the sum of its factors', and that of
a subnormal number is the lowest one of its format. An H200's recorded results have these bits
(docs/simulator.md); the rule for subnormal numbers and for f16 is that of MMA-Sim (microsoft/MMA-Sim). So
|D - exact| < 2**-13 * (33 * 2**E + |D|) per instruction: a kernel that leaves long sums to such products
loses digits that float32 would keep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import unmodelled
from ptxsim.units.numbers import SMALL

FRACTION = 13
"""Fraction bits of terms, and of sums in f32."""
TYPES = frozenset(("e4m3", "e5m2"))
"""Types of factors that are added up so."""
_ABSENT = -9999
"""Exponent of zero: below all others."""
_LOWEST = {"f32": -126, "f16": -14}
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def multiply_add(
    a: Floats, b: Floats, c: NDArray[Any] | None, types: tuple[str, str], kind: str
) -> NDArray[Any]:
    """A B^T + C: float32 [M, K] and [N, K] of `types`, C and the result of `kind` "f32" or "f16" [M, N]."""
    if kind not in _LOWEST:
        raise unmodelled(f"sums of type {kind} of 8-bit floats", "f32, f16")
    before = np.zeros((len(a), len(b))) if c is None else c.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        special = ~np.isfinite(a.astype(np.float64) @ b.T + before)
        if special.any():
            return _with_special(a, b, before, special, types, kind)
        return _rounded(_sum(a, b, before, types, kind), kind)


def _sum(a: Floats, b: Floats, c: Doubles, types: tuple[str, str], kind: str) -> Doubles:
    left, right = (
        _exponents(x, SMALL[type].lowest_exponent).T[..., None] for x, type in ((a, types[0]), (b, types[1]))
    )
    largest = _exponents(c, _LOWEST[kind])
    for mine, theirs in zip(left, right):
        np.maximum(largest, mine + theirs.T, out=largest)
    largest[largest < _ABSENT // 2] = 0
    scale = np.ldexp(1.0, FRACTION - largest)
    total = np.trunc(c * scale)
    for mine, theirs in zip(a.T.astype(np.float64), b.T):
        total += np.trunc(np.outer(mine, theirs) * scale)
    return total / scale


def _exponents(values: NDArray[Any], lowest: int) -> NDArray[np.int32]:
    exponents = np.maximum(np.frexp(values)[1] - 1, lowest)
    return np.where(values == 0, np.int32(_ABSENT), exponents)


def _rounded(total: Doubles, kind: str) -> NDArray[Any]:
    if kind == "f16":
        return total.astype(np.float16)
    quantum = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, _LOWEST["f32"]) - FRACTION)
    return (np.trunc(total / quantum) * quantum).astype(np.float32)


def _with_special(
    a: Floats, b: Floats, c: Doubles, special: NDArray[np.bool_], types: tuple[str, str], kind: str
) -> NDArray[Any]:
    """The same where some sums are infinite or no number, which follow from IEEE 754's rules."""
    exact = a.astype(np.float64) @ b.T + c
    finite = [np.where(np.isfinite(x), x, 0) for x in (a, b, c)]
    result = _rounded(_sum(finite[0], finite[1], finite[2], types, kind), kind)
    result[special] = exact[special]
    result[np.isnan(result)] = _NAN
    return result
