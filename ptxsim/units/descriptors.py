"""Matrix descriptors: 64 bits that say where an operand of wgmma or tcgen05.mma lies in shared memory.

PTX ISA "Shared Memory Descriptor" and "Canonical Layouts" (tcgen05), "Matrix Descriptor Format" and
"Strides" (wgmma). The operand is made of 16-byte chunks: 8 elements of 16 bits along K (K-major) or along M
or N (MN-major). Before swizzling, with span the bytes of a swizzled line and per = span / 16 chunks in it, a
chunk is at

    K-major, swizzled     row r, k-chunk c:  (r % 8) * span + (r / 8) * stride + 16 c
    K-major, none         row r, k-chunk c:  (r % 8) * 16 + (r / 8) * stride + c * leading
    MN-major, swizzled    mn-chunk m, k:     (m % per) * 16 + (m / per) * leading
                                             + (k % g) * span + (k / g) * stride
    MN-major, none        mn-chunk m, k:     m * stride + (k % 8) * 16 + (k / 8) * leading

with g = 8, or 4 for 32-byte atoms (those as CUTLASS has them: the ISA gives no formula). The start address
is added first and the whole address swizzled then, so a start inside the pattern works.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import invalid, unmodelled
from ptxsim.units.swizzle import B32, B64, B128, B128_ATOM32, CHUNK, NONE, Swizzle

Major = Literal["K", "MN"]
Bytes = NDArray[np.uint8]
_CHUNK_TYPE = np.dtype(f"V{CHUNK}")
TCGEN05_SWIZZLES = {0: NONE, 1: B128_ATOM32, 2: B128, 4: B64, 6: B32}
WGMMA_SWIZZLES = {0: NONE, 1: B128, 2: B64, 3: B32}


@dataclass(frozen=True)
class MatrixDescriptor:
    """Bytes: the `start` address in the CTA's shared window, the `leading` and `stride` dimension byte
    offsets."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle

    @property
    def layout(self) -> Layout:
        phase = self.start % self.swizzle.pattern
        return Layout(self.leading, self.stride, self.swizzle, phase)


@dataclass(frozen=True)
class Layout:
    """A descriptor without the part of its start address that only shifts everything."""

    leading: int
    stride: int
    swizzle: Swizzle
    phase: int


@lru_cache(maxsize=4096)
def decode_tcgen05(bits: int) -> MatrixDescriptor:
    """The descriptor of tcgen05.mma and tcgen05.cp. Raises UnsupportedError for a non-zero base offset and
    an absolute leading-dimension address, InputError for what is reserved."""
    if (bits >> 46) & 7 != 1:
        raise invalid(
            f"tcgen05 matrix descriptor {bits:#x} with {(bits >> 46) & 7} in bits 46-48", "the constant 1"
        )
    if (bits >> 52) & 1:
        raise unmodelled(
            f"leading dimension as absolute address (descriptor {bits:#x})", "a byte offset (bit 52 = 0)"
        )
    _reserved(bits, ((14, 2), (30, 2), (53, 8)))
    return _decode(bits, TCGEN05_SWIZZLES, bits >> 61)


@lru_cache(maxsize=4096)
def decode_wgmma(bits: int) -> MatrixDescriptor:
    """The descriptor of wgmma.mma_async. Raises UnsupportedError for a non-zero base offset, InputError for
    what is reserved."""
    _reserved(bits, ((14, 2), (30, 2), (46, 3), (52, 10)))
    return _decode(bits, WGMMA_SWIZZLES, bits >> 62)


def _decode(bits: int, swizzles: dict[int, Swizzle], mode: int) -> MatrixDescriptor:
    if mode not in swizzles:
        raise invalid(f"swizzling mode {mode} in matrix descriptor {bits:#x}", f"one of {sorted(swizzles)}")
    if (bits >> 49) & 7:
        raise unmodelled(
            f"base offset {(bits >> 49) & 7} in matrix descriptor {bits:#x}",
            "a pattern that begins aligned: 0",
        )
    start, leading, stride = (((bits >> at) & 0x3FFF) << 4 for at in (0, 16, 32))
    return MatrixDescriptor(start, leading, stride, swizzles[mode])


def _reserved(bits: int, fields: tuple[tuple[int, int], ...]) -> None:
    for at, width in fields:
        if (bits >> at) & ((1 << width) - 1):
            raise invalid(f"matrix descriptor {bits:#x}", f"0 in the reserved bits {at}-{at + width - 1}")


def operand(
    descriptor: MatrixDescriptor, major: Major, rows: int, k: int, dtype: np.dtype[Any], shared: Bytes
) -> NDArray[Any]:
    """The operand's elements as dtype [rows, k], a copy (in MN-major a transposed view of one).

    `rows` are those of A or D (M), or of B^T (N). `shared` is the CTA's shared window from address 0: uint8,
    its length a multiple of 16. k may span several instructions of consecutive K. Raises InputError where
    the operand reaches past the window or is not made of whole chunks.
    """
    order = _order(descriptor.layout, major, rows, k, dtype.itemsize)
    first = (descriptor.start - descriptor.layout.phase) // CHUNK
    chunks = shared.view(_CHUNK_TYPE)
    if first + order.beyond > len(chunks):
        raise invalid(
            f"operand of {descriptor} to shared address {(first + order.beyond) * CHUNK:#x}",
            f"shared memory of {len(shared)} bytes",
        )
    found = chunks[first:][order.index].view(dtype)
    return found if major == "K" else found.T


def touched(
    descriptor: MatrixDescriptor,
    major: Major,
    rows: int,
    k: int,
    itemsize: int,
    part: tuple[int, int] | None = None,
) -> NDArray[np.intp]:
    """16-byte chunks of the shared window that the operand lies in: intp, sorted, each once; chunk i is at
    address 16 i. `itemsize` is that of an element in bytes. `part` is (first, stop) of the rows that are
    asked for: whole chunks where M or N is contiguous."""
    layout = descriptor.layout
    if part is None:
        found = _order(layout, major, rows, k, itemsize).sorted
    else:
        found = _part(layout, major, rows, k, itemsize, *part)
    return found + (descriptor.start - layout.phase) // CHUNK


@lru_cache(maxsize=1024)
def _part(
    layout: Layout, major: Major, rows: int, k: int, itemsize: int, first: int, stop: int
) -> NDArray[np.intp]:
    index = _order(layout, major, rows, k, itemsize).index
    if major == "K":
        return np.unique(index[first:stop])
    return np.unique(index[:, first * itemsize // CHUNK : -(-stop * itemsize // CHUNK)])


@dataclass(frozen=True)
class _Order:
    """Chunk indices relative to the start of the pattern: `index` is [rows, k-chunks] or [k, mn-chunks]."""

    index: NDArray[np.intp]
    sorted: NDArray[np.intp]
    beyond: int


@lru_cache(maxsize=1024)
def _order(layout: Layout, major: Major, rows: int, k: int, itemsize: int) -> _Order:
    offsets = _k_major(layout, rows, k * itemsize) if major == "K" else _mn_major(layout, rows * itemsize, k)
    index = layout.swizzle(offsets + layout.phase) // CHUNK
    return _Order(index, np.unique(index), int(index.max()) + 1)


def _k_major(layout: Layout, rows: int, row_bytes: int) -> NDArray[np.intp]:
    span, swizzled = layout.swizzle.span, layout.swizzle.bits > 0
    if layout.swizzle is B128_ATOM32:
        raise unmodelled(f"{layout.swizzle} of a K-major operand", "MN-major operands with it")
    if row_bytes % CHUNK or (swizzled and row_bytes > span):
        raise invalid(
            f"K-major operand of {rows} rows of {row_bytes} bytes with {layout.swizzle}",
            "whole chunks of a line",
        )
    row, chunk = np.ogrid[:rows, : row_bytes // CHUNK]
    pitch = CHUNK if swizzled else layout.leading
    return row % 8 * span + row // 8 * layout.stride + chunk * pitch


def _mn_major(layout: Layout, column_bytes: int, k: int) -> NDArray[np.intp]:
    span, swizzled = layout.swizzle.span, layout.swizzle.bits > 0
    group = 4 if layout.swizzle is B128_ATOM32 else 8
    if column_bytes % CHUNK:
        raise invalid(f"MN-major operand of {column_bytes} bytes along M or N", "whole chunks of 16 bytes")
    depth, chunk = np.ogrid[:k, : column_bytes // CHUNK]
    if not swizzled:
        return chunk * layout.stride + depth % 8 * CHUNK + depth // 8 * layout.leading
    per = span // CHUNK
    along = chunk % per * CHUNK + chunk // per * layout.leading
    return along + depth % group * span + depth // group * layout.stride
