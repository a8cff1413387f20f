"""Register fragments of wgmma: the figures of the ISA, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.errors import InputError
from ptxsim.units import wgmma


@pytest.mark.parametrize("bits", (16, 32))
@pytest.mark.parametrize("n", (8, 64, 136, 256))
def test_accumulators(n: int, bits: int) -> None:
    """d0, d1 | d2, d3 | d4 ...: pairs of columns, 8 rows further for every other pair, 8 columns further
    after two."""
    fragment = wgmma.accumulator(n, bits)
    matrix = np.random.randint(0, 1 << bits, (64, n), dtype=np.uint64).astype(fragment.dtype)
    registers = wgmma.split(fragment, matrix)
    assert registers.shape == (4, n * bits // 64, 32)
    values = registers.view(fragment.dtype).reshape(4, -1, 32, 32 // bits)
    for _ in range(2000):
        warp, lane, i = np.random.randint(4), np.random.randint(32), np.random.randint(n // 2)
        row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
        column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
        per = 32 // bits
        assert values[warp, i // per, lane, i % per] == matrix[row, column]
    assert np.array_equal(wgmma.matrix(fragment, registers), matrix)


@pytest.mark.parametrize(("bits", "k"), ((8, 32), (16, 16), (32, 8)))
def test_multiplicand_a(bits: int, k: int) -> None:
    fragment = wgmma.multiplicand(bits)
    assert fragment.shape == (16, k) and fragment.registers == 4
    matrix = np.arange(64 * k).reshape(64, k).astype(fragment.dtype)
    registers = wgmma.split(fragment, matrix)
    per = 32 // bits
    for warp in range(4):
        for lane in range(32):
            for i in range(4 * per):
                row = 16 * warp + lane // 4 + 8 * (i // per % 2)
                column = per * (lane % 4) + i % per + k // 2 * (i // (2 * per))
                assert (
                    registers.view(fragment.dtype).reshape(4, 4, 32, per)[warp, i // per, lane, i % per]
                    == matrix[row, column]
                )
    assert np.array_equal(wgmma.matrix(fragment, registers), matrix)


def test_an_illegal_n_is_refused() -> None:
    for n in (4, 12, 264):
        with pytest.raises(InputError, match=f"N={n}"):
            wgmma.accumulator(n, 32)
