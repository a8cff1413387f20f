"""Fragments of mma.sync by the formulas that the ISA prints, element i of a lane by element; ldmatrix and
its kin by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ptxsim.errors import UnsupportedError
from ptxsim.units import fragments
from ptxsim.units.fragments import Fragment

Formula = Callable[[int, int, int], tuple[int, int]]
"""(groupID, threadID_in_group, i) to (row, column) of element i, counted through the lane's registers."""

A: dict[tuple[int, int], Formula] = {
    (8, 16): lambda g, t, i: (g + 8 * (i >= 2), t * 2 + (i & 1)),
    (16, 16): lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + 8 * (i >= 4)),
    (4, 32): lambda g, t, i: (g + 8 * i, t),
    (8, 32): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    (16, 8): lambda g, t, i: (g + 8 * (i >= 4), t * 4 + (i & 3)),
    (32, 8): lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + 16 * (i >= 8)),
}
"""Fragment layouts of A by K and bits of an element: "Matrix Fragments for mma.m16n8k4", k8, k16 and k32."""
B: dict[tuple[int, int], Formula] = {
    (8, 16): lambda g, t, i: (t * 2 + (i & 1), g),
    (16, 16): lambda g, t, i: (t * 2 + (i & 1) + 8 * (i >= 2), g),
    (4, 32): lambda g, t, i: (t, g),
    (8, 32): lambda g, t, i: (t + 4 * i, g),
    (16, 8): lambda g, t, i: (t * 4 + i, g),
    (32, 8): lambda g, t, i: (t * 4 + (i & 3) + 16 * (i >= 4), g),
}
"""(row, column) of B itself, K x 8."""


def check(fragment: Fragment, formula: Formula, transposed: bool = False) -> None:
    per = 32 // fragment.bits
    matrix = np.random.randint(0, 1 << fragment.bits, fragment.shape, dtype=np.uint64).astype(fragment.dtype)
    registers = np.zeros((fragment.registers, 32), np.uint32)
    for lane in range(32):
        for i in range(per * fragment.registers):
            row, column = formula(lane >> 2, lane % 4, i)
            value = int(matrix[column, row] if transposed else matrix[row, column])
            registers[i // per, lane] |= np.uint32(value << (i % per * fragment.bits))
    assert np.array_equal(fragment.split(matrix), registers)
    assert np.array_equal(fragment.matrix(registers), matrix)
    twice = np.stack([registers, registers[::-1]])
    assert np.array_equal(fragment.matrix(twice)[0], matrix)
    assert np.array_equal(fragment.split(fragment.matrix(twice)), twice)


@pytest.mark.parametrize(("k", "bits"), A)
def test_a(k: int, bits: int) -> None:
    check(fragments.multiplicand_a(k, bits), A[k, bits])


@pytest.mark.parametrize(("k", "bits"), B)
def test_b_is_kept_transposed(k: int, bits: int) -> None:
    check(fragments.multiplicand_b(k, bits), B[k, bits], transposed=True)


@pytest.mark.parametrize("bits", (16, 32))
def test_c(bits: int) -> None:
    check(fragments.accumulator(8, bits), lambda g, t, i: (g + 8 * (i >= 2), t * 2 + (i & 1)))


def test_other_shapes_are_refused() -> None:
    for call in (
        lambda: fragments.multiplicand_a(64, 4),
        lambda: fragments.multiplicand_a(32, 16),
        lambda: fragments.multiplicand_b(16, 64),
        lambda: fragments.accumulator(8, 64),
    ):
        with pytest.raises(UnsupportedError):
            call()


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("number", (1, 2, 4))
def test_ldmatrix_and_stmatrix(number: int, transposed: bool) -> None:
    rows = np.random.randint(0, 256, (number, 8, 16)).astype(np.uint8)
    elements = rows.view(np.uint16)
    registers = fragments.ldmatrix(rows, transposed)
    for matrix in range(number):
        for lane in range(32):
            i, j = lane // 4, 2 * (lane % 4)
            low, high = (
                (elements[matrix, j, i], elements[matrix, j + 1, i])
                if transposed
                else elements[matrix, i, j : j + 2]
            )
            assert registers[matrix, lane] == int(low) | int(high) << 16
    assert np.array_equal(fragments.stmatrix(registers, transposed), rows)


def test_addresses_of_rows_come_from_consecutive_lanes() -> None:
    lanes = fragments.row_lanes(4)
    assert lanes.shape == (4, 8) and list(lanes[2]) == list(range(16, 24))


def test_movmatrix_transposes() -> None:
    rows = np.random.randint(0, 256, (1, 8, 16)).astype(np.uint8)
    moved = fragments.movmatrix(fragments.ldmatrix(rows, False)[0])
    assert np.array_equal(moved, fragments.ldmatrix(rows, True)[0])
    assert np.array_equal(fragments.movmatrix(moved), fragments.ldmatrix(rows, False)[0])
