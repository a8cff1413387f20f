"""Scale factors in tensor memory, for one CTA and for either of a pair, against a loop over D."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.errors import InputError
from ptxsim.units import accumulators, scales
from ptxsim.units.accumulators import Accumulator
from ptxsim.units.instruction import decode

SFA, SFB = 300, 320


def cell(cells: np.ndarray, lane: int, column: int, byte: int, code: int) -> None:
    cells.view(np.uint8)[lane, 4 * column + byte] = code


@pytest.mark.parametrize(("n", "byte"), ((64, 0), (192, 2)))
@pytest.mark.parametrize(("m", "group"), ((128, 1), (256, 2), (128, 2)))
def test_each_quarter_reads_its_own(m: int, group: int, n: int, byte: int) -> None:
    """Factors of A by row; those of B by column, or where the halves of the columns have their own lanes by
    column within the half. What other quarters hold, and the other bytes, do not count."""
    rows, k = m // group, 64
    halves = 2 if rows == 64 else 1
    bits = m >> 4 << 24 | n >> 3 << 17 | 1 << 10 | 1 << 7 | 1 << 23 | byte << 29 | byte << 4
    shape = decode(bits, "mxf4", group, block=32)
    cells = np.full((128, 512), 0xFFFFFFFF, np.uint32)
    of_a, of_b = (np.random.randint(125, 130, (lines, 2)) for lines in (rows, n))
    for quarter in range(4):
        first = 32 * (quarter % (rows // 32))
        for row in range(first, first + 32):
            for i in range(2):
                cell(cells, 32 * quarter + row % 32, SFA + row // 32, byte + i, int(of_a[row, i]))
        start = quarter // 2 * (n // 2) if halves == 2 else 0
        for column in range(n // halves):
            for i in range(2):
                code = int(of_b[start + column, i])
                cell(cells, 32 * quarter + column % 32, SFB + column // 32, byte + i, code)
    a, b = (np.random.randint(-6, 7, (lines, k)).astype(np.float32) for lines in (rows, n))
    d = Accumulator(0, m, n, "f32", group)
    d.write(cells, np.ones((rows, n), np.float32))
    addresses = (SFA | byte << 30, SFB | byte << 30)
    parts = scales.quarters(cells, shape, addresses, (a,), b, group)
    accumulators.execute_scaled(cells, d, parts, keep=True)
    left, right = (x * 2.0 ** (f - 127.0).repeat(32, axis=1) for x, f in ((a, of_a), (b, of_b)))
    assert np.array_equal(d.read(cells), (left @ right.T + 1).astype(np.float32))


def test_factors_outside_of_tensor_memory() -> None:
    assert scales.factors_region(508, 128).columns == slice(508, 512)
    with pytest.raises(InputError, match="512 columns"):
        scales.factors_region(509, 128)
    with pytest.raises(InputError, match="128 lanes"):
        scales.factors_region(16 << 16, 32)
