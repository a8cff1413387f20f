"""Scale factors of tcgen05.mma with block scaling, and where tensor memory has them.

PTX ISA "Scale Factor A/B Layout" (.scale_vec::1X, 2X, 4X). The factors of 32 rows of A, or of 32 columns of
B, are a column of tensor memory, in 32 lanes; the next 32 are the next column. A cell has up to four factors
of one row, for consecutive blocks of K. Each quarter of the lanes has all of it, for the part of D that it
computes: tcgen05.cp with .warpx4 writes it to all four. Checked against CUTLASS's layouts of these tensors;
no chip that has these instructions was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.instruction import InstructionDescriptor, Scaling
from ptxsim.units.numbers import Floats, decode
from ptxsim.units.tensor import Cells, Region, region, split_address

QUARTER = 32
"""Lanes of a quarter of tensor memory, and rows or columns whose factors are one column."""
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Quarter:
    """Operands of 32 lanes from `lane` on: scaled rows of A, and of B^T, float64 [rows, K]."""

    lane: int
    left: Doubles
    right: Doubles


def columns_of(count: int) -> int:
    """Columns of tensor memory with the factors of `count` rows."""
    return -(-count // QUARTER)


def factors_region(address: int, count: int) -> Region:
    """The cells with the factors of `count` rows. Their address has a byte in its top bits, which the
    instruction descriptor says again. Raises InputError where they leave tensor memory."""
    lane, column = split_address(address & 0x3FFFFFFF)
    return region(lane, 4 * QUARTER, column, columns_of(count))


def factors(
    cells: Cells, address: int, rows: slice, lane: int, byte: int, scaling: Scaling, k: int
) -> Doubles:
    """Factors of `rows`, in the quarter from `lane` on: float64 [rows, k], each as often as it counts."""
    column = split_address(address & 0x3FFFFFFF)[1]
    row = np.arange(rows.start, rows.stop)
    found = cells[lane + row % QUARTER, column + row // QUARTER]
    codes = np.ascontiguousarray(found).view(np.uint8).reshape(-1, 4)[:, byte : byte + k // scaling.block]
    return np.repeat(decode(scaling.type, codes).astype(np.float64), scaling.block, axis=1)


def quarters(
    cells: Cells,
    shape: InstructionDescriptor,
    addresses: tuple[int, int],
    a: tuple[Floats, ...],
    b: Floats,
    cta_group: int,
) -> tuple[Quarter, ...]:
    """A CTA's share of the product, in quarters of its lanes. `addresses` are those of the factors of A and
    of B; `a` is float32 [rows of the CTA, K], once or for either half of the columns; b [n, K]."""
    scaling = shape.scaling
    assert scaling is not None
    across = 2 if shape.m // cta_group == 64 else 1
    width, down = shape.n // across, 4 // across
    found = []
    for quarter in range(4):
        lane, half = QUARTER * quarter, quarter // down
        rows = slice(QUARTER * (quarter % down), QUARTER * (quarter % down + 1))
        columns = slice(width * half, width * (half + 1))
        of_a = factors(cells, addresses[0], rows, lane, scaling.a_byte, scaling, shape.k)
        of_b = factors(cells, addresses[1], slice(0, width), lane, scaling.b_byte, scaling, shape.k)
        found.append(Quarter(lane, a[half % len(a)][rows] * of_a, b[columns] * of_b))
    return tuple(found)
