"""Register fragments of wgmma.mma_async: four warps, each with 16 of 64 rows.

PTX ISA "Matrix Fragments for wgmma.mma_async.m64nNk16" and its siblings for k8 and k32. A warp's part is
laid out as mma.sync's A (16 x K) and C (16 x 8, repeated along N); warp w of the warpgroup has rows 16 w to
16 w + 15.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units import fragments
from ptxsim.units.errors import invalid
from ptxsim.units.fragments import Fragment, Registers

WARPS = 4
ROWS = 64
DEPTH = {8: 32, 16: 16, 32: 8}
"""K of a dense instruction by the bits of an element of A: 32 bytes of each row."""


def accumulator(n: int, bits: int) -> Fragment:
    """One warp's part of D, 16 x n of 32 or 16 bits: n / 2 or n / 4 registers. Raises InputError for an
    illegal n."""
    if n % 8 or not 8 <= n <= 256:
        raise invalid(f"wgmma of N={n}", "a multiple of 8 up to 256")
    return fragments.accumulator(n, bits)


def multiplicand(bits: int) -> Fragment:
    """One warp's part of A in registers, 16 x K of 8, 16 or 32 bits: 4 registers."""
    return fragments.multiplicand_a(DEPTH[bits], bits)


def matrix(fragment: Fragment, registers: Registers) -> NDArray[Any]:
    """The warpgroup's matrix: uint32 [4 warps, registers, 32 lanes] to raw elements [64, columns]."""
    return fragment.matrix(registers).reshape(ROWS, fragment.shape[1])


def split(fragment: Fragment, whole: NDArray[Any]) -> Registers:
    """Raw elements [64, columns] to uint32 [4 warps, registers, 32 lanes]."""
    parts = np.ascontiguousarray(whole).view(fragment.dtype).reshape(WARPS, *fragment.shape)
    return fragment.split(parts)
