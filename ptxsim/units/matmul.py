"""Multiply-accumulate of tensor cores: D = A B^T + C.

Inputs of 16 bits and fewer are exact in float32, and so are their products; sums are made in float32 by
BLAS. Silicon adds in another order, with another width and by truncation: the PTX ISA leaves "accumulation
order, rounding and handling of subnormal inputs" unspecified (wgmma.mma_async, tcgen05.mma, mma). What can
be relied on is |D - exact| <= (K + 1) * 2**-23 * (sum over k of |A B| + |C|) per instruction, twice what
float32 sums in any order have; but not for 8-bit floats in Hopper's wgmma, whose sums have 13 fraction bits
(aligned.py). Blackwell keeps 25 fraction bits of theirs (MMA-Sim). Integers are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import unmodelled

Floats = NDArray[np.float32]
INTEGER_DEPTH = 256
"""Up to this K sums of products of 8-bit integers are exact in float32: 256 * 255 * 255 < 2**24."""


def multiply(a: Floats, b: Floats) -> Floats:
    """A B^T: float32 [M, K] and [N, K] to [M, N]."""
    return np.matmul(a, b.T)


def accumulate(d: Floats, a: Floats, b: Floats, keep: bool, halvings: int = 0) -> None:
    """D = A B^T + D * 2**-halvings in place, or D = A B^T unless `keep`. d is float32 [M, N], perhaps
    strided."""
    if not keep:
        np.matmul(a, b.T, out=d)
        return
    if halvings:
        np.ldexp(d, -halvings, out=d)
    d += multiply(a, b)


def multiply_add(
    a: Floats, b: Floats, c: NDArray[Any] | None, type: str, *, halvings: int = 0, saturate: bool = False
) -> NDArray[Any]:
    """A B^T + C * 2**-halvings in the accumulator's type: "f32", "f16" or "s32" give float32, float16, int32
    [M, N].

    C has that dtype too, or is None for zeros. f16 is rounded once, to nearest even, from a float32 sum. s32
    wraps, or with `saturate` clamps. Raises UnsupportedError for other types.
    """
    product = multiply(a, b)
    match type:
        case "f32":
            if c is not None:
                product += np.ldexp(c, -halvings) if halvings else c
            return product
        case "f16":
            if c is not None:
                product += np.ldexp(c.astype(np.float32), -halvings)
            with np.errstate(over="ignore"):
                return product.astype(np.float16)
        case "s32":
            return _integers(product, a.shape[1], c, saturate)
    raise unmodelled(f"accumulators of type {type}", "f32, f16, s32")


def _integers(product: Floats, depth: int, c: NDArray[Any] | None, saturate: bool) -> NDArray[np.int32]:
    if depth > INTEGER_DEPTH:
        raise unmodelled(f"integer products of depth {depth} at once", f"at most {INTEGER_DEPTH}")
    if c is None:
        return product.astype(np.int32)
    total = product.astype(np.int64) + c
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32)
