"""Swizzling modes against the ISA's tables, which print for each line of shared memory the order of its
chunks."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.errors import InputError
from ptxsim.units import swizzle as s

PATTERNS = {
    s.NONE: "01234567",
    s.B32: "01234567 10325476",
    s.B64: "01234567 10325476 23016745 32107654",
    s.B128: "01234567 10325476 23016745 32107654 45670123 54761032 67452301 76543210",
    s.B128_ATOM32: "01234567 23016745 45670123 67452301",
    s.B128_ATOM64: "01234567 45670123",
}
"""PTX ISA "Swizzling Modes": rows of 128 bytes, numbered chunks of 16, from an aligned address, then
repeating."""


def expected(mode: s.Swizzle, lines: int) -> list[int]:
    """Chunk at each place of shared memory, by the tables."""
    rows = PATTERNS[mode].split()
    return [8 * line + int(chunk) for line in range(lines) for chunk in rows[line % len(rows)]]


@pytest.mark.parametrize("mode", PATTERNS, ids=repr)
def test_the_tables_of_the_isa(mode: s.Swizzle) -> None:
    order = s.permutation(mode, 3 * 1024, 24 * 128)
    assert list(order) == expected(mode, 24)


@pytest.mark.parametrize("mode", PATTERNS, ids=repr)
def test_any_start_uses_absolute_bits_and_is_its_own_inverse(mode: s.Swizzle) -> None:
    start = int(np.random.randint(0, 200)) * 128
    size = int(np.random.randint(1, 30)) * 128
    order = s.permutation(mode, start, size)
    assert np.array_equal(order[order], np.arange(size // 16))
    for chunk, place in enumerate(order):
        assert mode(start + 16 * chunk) == start + 16 * place


def test_arrays_and_ints_agree_and_bits_within_an_atom_stay() -> None:
    addresses = np.random.randint(0, 1 << 18, 500).astype(np.uint32)
    for mode in PATTERNS:
        assert [mode(int(a)) for a in addresses] == list(mode(addresses))
        assert np.array_equal(mode(addresses) % 16, addresses % 16)


def test_a_range_that_is_not_closed_is_refused() -> None:
    s.permutation(s.B64, 64, 64)
    for start, size in ((32, 64), (64, 32)):
        with pytest.raises(InputError, match="multiples of 64 bytes"):
            s.permutation(s.B64, start, size)
