"""cvt.rs.bf16x2.f32 against exact arithmetic, and what its results are on average."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from lanes import apply

LARGEST = 0x7F7F


def single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def exact(bits: int, drawn: int, relu: bool, finite: bool) -> int:
    """The bf16 number below in magnitude, or the one above where the part of the way to it that is left, in
    units of 1 / 65536, and the drawn number reach 1."""
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 31
    if magnitude > 0x7F800000:
        return 0x7FFF
    if relu and sign:
        return 0
    below = magnitude >> 16
    if magnitude != 0x7F800000:
        left = Fraction(magnitude - (below << 16), 1 << 16)
        below += left + Fraction(drawn, 1 << 16) >= 1
    return min(below, LARGEST if finite else 0x7F80) | sign << 15


SPECIAL = [
    0,
    1,
    0x80000000,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x7F800001,
    0x7F7FFFFF,
    0xFF7F8000,
    0x7F7F0000,
]


@pytest.mark.parametrize("flags", ["", ".relu", ".satfinite", ".relu.satfinite"])
def test_each_half_by_its_own_bits(flags: str) -> None:
    a, b, drawn = np.random.randint(0, 1 << 32, (3, 32), dtype=np.uint64).tolist()
    a[:10], b[5:15], drawn[0], drawn[1] = SPECIAL, SPECIAL, 0xFFFFFFFF, 0xFFFFFFFF
    found = apply(f"cvt.rs{flags}.bf16x2.f32", "b32", ("f32", a), ("f32", b), ("b32", drawn))
    how = "relu" in flags, "satfinite" in flags
    for x, y, bits, result in zip(a, b, drawn, found, strict=True):
        assert result == exact(x, bits >> 16, *how) << 16 | exact(y, bits & 0xFFFF, *how), (x, y, bits)


def test_all_draws_give_the_number_on_average() -> None:
    number, total = 0x3F801234, Fraction(0)
    for start in range(0, 1 << 16, 1 << 11):
        drawn = [start + 64 * i for i in range(32)]
        found = apply("cvt.rs.bf16x2.f32", "b32", ("f32", [0] * 32), ("f32", [number] * 32), ("b32", drawn))
        total += sum(Fraction(single(x << 16)) for x in found)
    assert abs(total / 1024 - Fraction(single(number))) < Fraction(1, 1 << 16)
