"""Matrix descriptors: fields, and operands gathered element by element through the ISA's canonical
layouts."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.errors import InputError, UnsupportedError
from ptxsim.units import swizzle
from ptxsim.units.descriptors import (
    MatrixDescriptor,
    decode_tcgen05,
    decode_wgmma,
    operand,
    touched,
)

CANONICAL = {
    ("MN", swizzle.NONE): "((T,1,m),(8,k)):((1,T,SBO),(T,LBO))",
    ("MN", swizzle.B32): "((T,2,m),(8,k)):((1,T,LBO),(2*T,SBO))",
    ("MN", swizzle.B64): "((T,4,m),(8,k)):((1,T,LBO),(4*T,SBO))",
    ("MN", swizzle.B128): "((T,8,m),(8,k)):((1,T,LBO),(8*T,SBO))",
    ("MN", swizzle.B128_ATOM32): "((T,8,m),(4,k)):((1,T,LBO),(8*T,SBO))",
    ("K", swizzle.NONE): "((8,m),(T,k)):((T,SBO),(1,LBO))",
    ("K", swizzle.B32): "((8,m),(T,k)):((2*T,SBO),(1,T))",
    ("K", swizzle.B64): "((8,m),(T,k)):((4*T,SBO),(1,T))",
    ("K", swizzle.B128): "((8,m),(T,k)):((8*T,SBO),(1,T))",
}
"""PTX ISA "Canonical Layouts" (the fifth: CUTLASS, make_umma_desc): (rows, k) to an offset in elements, T of
which make 16 bytes; m and k stand for as many as the operand has."""


def offset(canonical: str, row: int, k: int, names: dict[str, int]) -> int:
    """The layout at (row, k), in elements."""
    shapes, strides = eval(canonical.replace(":", ","), {}, names)
    total = 0
    for index, shape, stride in zip((row, k), shapes, strides):
        for i, (extent, step) in enumerate(zip(shape, stride)):
            last = i == len(shape) - 1
            total += (index if last else index % extent) * step
            index //= extent
    return total


def cute_swizzle(mode: swizzle.Swizzle, address: int) -> int:
    """Swizzle<B, M, S> on a byte address, bit by bit."""
    bits, base, shift = {
        swizzle.NONE: (0, 4, 3),
        swizzle.B32: (1, 4, 3),
        swizzle.B64: (2, 4, 3),
        swizzle.B128: (3, 4, 3),
        swizzle.B128_ATOM32: (2, 5, 2),
    }[mode]
    for bit in range(base, base + bits):
        address ^= ((address >> (bit + shift)) & 1) << bit
    return address


@pytest.mark.parametrize("itemsize", (1, 2, 4))
@pytest.mark.parametrize(("major", "mode"), CANONICAL, ids=str)
def test_operands_element_by_element(major: str, mode: swizzle.Swizzle, itemsize: int) -> None:
    per_chunk, deep = 16 // itemsize, 32 // itemsize
    rows = per_chunk * int(np.random.randint(1, 9)) if major == "MN" else 8 * int(np.random.randint(1, 5))
    start = 16 * int(np.random.randint(0, 300))
    leading, stride = (128 * int(np.random.randint(1, 40)) for _ in range(2))
    shared = np.random.randint(0, 256, 1 << 16).astype(np.uint8)
    names = {"T": per_chunk, "LBO": leading // itemsize, "SBO": stride // itemsize, "m": 99, "k": 99}
    dtype = np.dtype(f"u{itemsize}")
    expected = np.zeros((rows, deep), dtype)
    chunks = set()
    for row in range(rows):
        for k in range(deep):
            at = cute_swizzle(mode, start + itemsize * offset(CANONICAL[major, mode], row, k, names))
            expected[row, k] = shared[at : at + itemsize].view(dtype)[0]
            chunks.add(at // 16)
    descriptor = MatrixDescriptor(start, leading, stride, mode)
    assert np.array_equal(operand(descriptor, major, rows, deep, dtype, shared), expected)
    assert list(touched(descriptor, major, rows, deep, itemsize)) == sorted(chunks)


def test_advancing_k_inside_a_line_is_addition_to_the_start() -> None:
    shared = np.random.randint(0, 256, 1 << 15).astype(np.uint8)
    dtype = np.dtype("u2")
    whole = operand(MatrixDescriptor(2048, 16, 1024, swizzle.B128), "K", 64, 64, dtype, shared)
    for step in range(4):
        part = operand(MatrixDescriptor(2048 + 32 * step, 16, 1024, swizzle.B128), "K", 64, 16, dtype, shared)
        assert np.array_equal(part, whole[:, 16 * step : 16 * step + 16])


def test_an_operand_is_a_copy_and_stays_inside_shared_memory() -> None:
    shared = np.zeros(8192, np.uint8)
    found = operand(MatrixDescriptor(0, 16, 1024, swizzle.B128), "K", 64, 16, np.dtype("u2"), shared)
    shared[:] = 1
    assert not found.any()
    with pytest.raises(InputError, match="shared memory of 8192 bytes"):
        operand(MatrixDescriptor(1024, 16, 1024, swizzle.B128), "K", 64, 16, np.dtype("u2"), shared)
    for rows, k in ((64, 4), (64, 128)):
        with pytest.raises(InputError, match="K-major operand"):
            operand(MatrixDescriptor(0, 16, 1024, swizzle.B128), "K", rows, k, np.dtype("u2"), shared)
    with pytest.raises(UnsupportedError, match="K-major"):
        operand(MatrixDescriptor(0, 16, 1024, swizzle.B128_ATOM32), "K", 8, 16, np.dtype("u2"), shared)


def test_decoding() -> None:
    start, leading, stride = (16 * int(np.random.randint(0, 1 << 14)) for _ in range(3))
    fields = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32
    for code, mode in (
        (0, swizzle.NONE),
        (1, swizzle.B128_ATOM32),
        (2, swizzle.B128),
        (4, swizzle.B64),
        (6, swizzle.B32),
    ):
        assert decode_tcgen05(fields | 1 << 46 | code << 61) == MatrixDescriptor(start, leading, stride, mode)
    for code, mode in ((0, swizzle.NONE), (1, swizzle.B128), (2, swizzle.B64), (3, swizzle.B32)):
        assert decode_wgmma(fields | code << 62) == MatrixDescriptor(start, leading, stride, mode)


@pytest.mark.parametrize(
    ("bits", "error", "named"),
    (
        (0, InputError, "bits 46-48"),
        (1 << 46 | 1 << 52, UnsupportedError, "absolute address"),
        (1 << 46 | 1 << 49, UnsupportedError, "base offset 1"),
        (1 << 46 | 3 << 61, InputError, "mode 3"),
        (1 << 46 | 1 << 14, InputError, "bits 14-15"),
        (1 << 46 | 1 << 53, InputError, "bits 53-60"),
    ),
)
def test_tcgen05_fields_that_are_refused(bits: int, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        decode_tcgen05(bits)


@pytest.mark.parametrize(
    ("bits", "error", "named"),
    (
        (1 << 46, InputError, "bits 46-48"),
        (1 << 49, UnsupportedError, "base offset 1"),
        (1 << 61, InputError, "bits 52-61"),
        (1 << 31, InputError, "bits 30-31"),
    ),
)
def test_wgmma_fields_that_are_refused(bits: int, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        decode_wgmma(bits)
