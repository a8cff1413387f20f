"""Elements of MMA operands of 8, 6 and 4 bits as memory has them, 32 bytes for one instruction's K.

PTX ISA "Packing Formats of Elements in Tensor and Shared Memory". In kinds f8f6f4 and mxf8f6f4 an element
takes a byte: in tensor memory those of 4 bits stand in bits 2 to 5, those of 6 bits in bits 0 to 5; in shared
memory 16 elements lie one after another, and a gap behind them fills 16 bytes (as TMA brings them). In mxf4
and mxf4nvf4 two elements share a byte everywhere, the first one in its low half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.numbers import SMALL, Floats, decode, raw_dtype

Bytes = NDArray[np.uint8]
GROUP = 16
"""Elements, and bytes, of a group in shared memory."""


def bits_of(type: str) -> int:
    """Bits of a number of a small type."""
    return 1 + SMALL[type].exponent + SMALL[type].mantissa


def is_packed(kind: str, type: str) -> bool:
    """True if operands do not lie element by element as their dtype has them."""
    return type in SMALL and bits_of(type) < 8


def from_shared(kind: str, type: str, rows: Bytes) -> Floats:
    """Elements of packed rows in shared memory, uint8 [rows, 32], K-major: float32 [rows, K]."""
    return decode(type, nibbles(rows) if kind.startswith("mxf4") else gathered(rows, bits_of(type)))


def from_tensor(kind: str, type: str, words: NDArray[np.uint32]) -> Floats:
    """Elements of rows in tensor memory, uint32 [rows, 8]: float32 [rows, K]."""
    whole = np.ascontiguousarray(words)
    if not is_packed(kind, type):
        return decode(type, whole.view(raw_dtype(type)))
    rows = whole.view(np.uint8)
    if kind.startswith("mxf4"):
        return decode(type, nibbles(rows))
    return decode(type, rows >> np.uint8(2) if bits_of(type) == 4 else rows)


def nibbles(rows: Bytes) -> Bytes:
    """Codes of 4 bits, low half first: twice as many columns."""
    return np.stack((rows & np.uint8(15), rows >> np.uint8(4)), axis=-1).reshape(len(rows), -1)


def gathered(rows: Bytes, bits: int) -> Bytes:
    """Codes of 4 or 6 bits, from groups of 16 in 16 bytes with a gap at their end: one in each byte."""
    groups = rows.reshape(-1, GROUP)[:, : 2 * bits]
    stream = np.unpackbits(groups, axis=1, bitorder="little").reshape(-1, GROUP, bits)
    codes: NDArray[Any] = np.packbits(stream, axis=2, bitorder="little")
    return codes.reshape(len(rows), -1)


def spread(rows: Bytes, bits: int) -> Bytes:
    """The same groups as tcgen05.cp decompresses them, to elements as tensor memory has them."""
    codes = gathered(rows, bits)
    return codes << np.uint8(2) if bits == 4 else codes
