"""Matrix fragments, by lane and register of a warp: mma.sync, ldmatrix, stmatrix, movmatrix.

PTX ISA "Matrix Fragments for mma.m16n8k..." and "Warp-level matrix load / store / transpose". All fragments
of mma.sync follow from one rule: a lane is (group, member) = (lane / 4, lane % 4), a register holds E = 32 /
bits elements, and

    A (16 x K)    row group + 8 * (register % 2)     k  E * member + element + 4 E * (register / 2)
    B^T (8 x K)   row group (that is n)              k  E * member + element + 4 E * register
    C, 32 bits    row group + 8 * (register / 2)     n  2 * member + register % 2
    C, 16 bits    as A
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import unmodelled

LANES = 32
Registers = NDArray[np.uint32]
Indices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Fragment:
    """`rows` and `columns` of the element at [register, lane, element in the register, low bits first],
    intp; the matrix is shape[0] x shape[1] elements of `bits` bits."""

    rows: Indices
    columns: Indices
    shape: tuple[int, int]
    bits: int

    @property
    def registers(self) -> int:
        return self.rows.shape[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.bits // 8}")

    @cached_property
    def _place(self) -> Indices:
        """For every element in the order of registers, its place in the matrix."""
        return (self.rows * self.shape[1] + self.columns).reshape(-1)

    @cached_property
    def _source(self) -> Indices:
        return np.argsort(self._place)

    def matrix(self, registers: Registers) -> NDArray[Any]:
        """uint32 [..., registers, 32 lanes], contiguous, to raw elements [..., rows, columns]."""
        outer = registers.shape[:-2]
        return (
            registers.view(self.dtype)
            .reshape(*outer, -1)
            .take(self._source, axis=-1)
            .reshape(*outer, *self.shape)
        )

    def split(self, matrix: NDArray[Any]) -> Registers:
        """Raw elements [..., rows, columns] of the fragment's dtype to uint32 [..., registers, 32 lanes]."""
        outer = matrix.shape[:-2]
        elements = matrix.reshape(*outer, -1).take(self._place, axis=-1)
        return elements.view(np.uint32).reshape(*outer, self.registers, LANES)


def _coordinates(registers: int, bits: int) -> tuple[Indices, Indices, Indices, Indices, int]:
    register, lane, element = np.ogrid[:registers, :LANES, : 32 // bits]
    return register, lane // 4, lane % 4, element, 32 // bits


def _fragment(rows: Indices, columns: Indices, shape: tuple[int, int], bits: int) -> Fragment:
    rows, columns = (np.ascontiguousarray(table) for table in np.broadcast_arrays(rows, columns))
    return Fragment(rows, columns, shape, bits)


@lru_cache
def multiplicand_a(k: int, bits: int) -> Fragment:
    """A of 16 x k elements of 8, 16 or 32 bits, as mma.sync and (one warp of it) wgmma hold it. Raises
    UnsupportedError unless a row is 16 or 32 bytes."""
    registers = _row_bytes(k, bits) // 8
    register, group, member, element, per = _coordinates(registers, bits)
    return _fragment(
        group + 8 * (register % 2), per * member + element + 4 * per * (register // 2), (16, k), bits
    )


@lru_cache
def multiplicand_b(k: int, bits: int) -> Fragment:
    """B^T of 8 x k elements of 8, 16 or 32 bits, as mma.sync holds it."""
    registers = _row_bytes(k, bits) // 16
    register, group, member, element, per = _coordinates(registers, bits)
    return _fragment(group, per * member + element + 4 * per * register, (8, k), bits)


@lru_cache
def accumulator(n: int, bits: int) -> Fragment:
    """C or D of 16 x n elements of 32 or 16 bits: n = 8 for mma.sync, a multiple of 8 for one warp of
    wgmma."""
    if bits == 16:
        register, group, member, element, _ = _coordinates(n // 4, 16)
        return _fragment(group + 8 * (register % 2), 2 * member + element + 8 * (register // 2), (16, n), 16)
    if bits != 32:
        raise unmodelled(f"accumulators of {bits} bits", "16 and 32")
    register, group, member, _, _ = _coordinates(n // 2, 32)
    columns = 2 * member + register % 2 + 8 * (register // 4)
    return _fragment(group + 8 * (register // 2 % 2), columns, (16, n), 32)


def _row_bytes(k: int, bits: int) -> int:
    size = k * bits // 8
    if bits not in (8, 16, 32) or size not in (16, 32):
        raise unmodelled(
            f"a multiplicand of K={k} elements of {bits} bits", "rows of 16 or 32 bytes of 8, 16, 32 bits"
        )
    return size


# --- 8 x 8 matrices of 16 bits ------------------------------------------------------------------------------


@lru_cache
def _eight(transposed: bool) -> Fragment:
    """m8n8.b16: lane 4 i + j holds elements 2 j and 2 j + 1 of row i, or of column i where transposed."""
    _, group, member, element, _ = _coordinates(1, 16)
    along = 2 * member + element
    return _fragment(along, group, (8, 8), 16) if transposed else _fragment(group, along, (8, 8), 16)


def row_lanes(number: int) -> Indices:
    """Lane whose address says where row j of matrix i is: intp [number, 8], for .x1, .x2 and .x4."""
    return np.arange(8 * number, dtype=np.intp).reshape(number, 8)


def ldmatrix(rows: NDArray[np.uint8], transposed: bool) -> Registers:
    """ldmatrix.m8n8{.trans}.b16: uint8 [matrices, 8 rows, 16 bytes] to uint32 [registers, 32 lanes],
    register i from matrix i."""
    matrices = rows.view(np.uint16)
    return _eight(transposed).split(matrices)[:, 0]


def stmatrix(registers: Registers, transposed: bool) -> NDArray[np.uint8]:
    """stmatrix.m8n8{.trans}.b16: uint32 [registers, 32 lanes] to uint8 [matrices, 8 rows, 16 bytes]."""
    return _eight(transposed).matrix(registers[:, None]).view(np.uint8)


def stmatrix_tall(registers: Registers) -> NDArray[np.uint8]:
    """stmatrix.m16n8.trans.b8: uint32 [registers, 32 lanes] to uint8 [matrices, 8 rows, 16 bytes].

    Lane 4 i + j holds elements (i, 2 j), (i, 2 j + 1), (i + 8, 2 j), (i + 8, 2 j + 1), as those of an
    accumulator; what is stored is the transposed matrix.
    """
    held = np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 8, 4, 2, 2)
    return np.ascontiguousarray(held.transpose(0, 2, 4, 3, 1)).reshape(-1, 8, 16)


def movmatrix(register: Registers) -> Registers:
    """movmatrix.m8n8.trans.b16: uint32 [32 lanes] to the fragment of the transposed matrix."""
    matrix = _eight(False).matrix(register[None])
    return _eight(True).split(matrix)[0]
