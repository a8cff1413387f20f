"""Swizzling modes of shared memory: which address an unswizzled address really means.

PTX ISA "Swizzling Modes" (of tensors) and "Shared Memory Layout and Swizzling" (matrix
descriptors): a few bits of the absolute shared address are XORed with higher ones, so a chunk of 16 bytes
(the atom; 32 or 64 in two modes) stays whole and moves within its line of 32, 64 or 128 bytes. The XOR is
its own inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import invalid

CHUNK = 16
"""Bytes that every mode keeps together: the unit of all permutations here."""

Addresses = TypeVar("Addresses", int, NDArray[Any])


@dataclass(frozen=True)
class Swizzle:
    """Address bits [base, base + bits) ^= bits [base + shift, base + shift + bits)."""

    name: str
    bits: int
    base: int = 4
    shift: int = 3

    @property
    def span(self) -> int:
        """Bytes of the line that a chunk stays in: 16 (no swizzle), 32, 64 or 128."""
        return 1 << (self.base + self.bits)

    @property
    def pattern(self) -> int:
        """Bytes after which the pattern repeats: 256, 512 or 1024, for 16-byte atoms; 16 for no swizzle."""
        return 1 << (self.base + self.shift + self.bits) if self.bits else CHUNK

    def __call__(self, addresses: Addresses) -> Addresses:
        """Swizzled addresses of the bytes at these unswizzled absolute ones: an int, or an array of
        integers."""
        mask = ((1 << self.bits) - 1) << self.base
        return addresses ^ ((addresses >> self.shift) & mask)

    def __repr__(self) -> str:
        return self.name


NONE = Swizzle("no swizzle", bits=0)
B32 = Swizzle("32B swizzle", bits=1)
B64 = Swizzle("64B swizzle", bits=2)
B128 = Swizzle("128B swizzle", bits=3)
B128_ATOM32 = Swizzle("128B swizzle with 32B atoms", bits=2, base=5, shift=2)
B128_ATOM64 = Swizzle("128B swizzle with 64B atoms", bits=1, base=6, shift=1)


@lru_cache(maxsize=1024)
def _permutation(swizzle: Swizzle, phase: int, chunks: int) -> NDArray[np.intp]:
    dense = phase + CHUNK * np.arange(chunks, dtype=np.intp)
    order = (swizzle(dense) - phase) // CHUNK
    order.flags.writeable = False
    return order


def permutation(swizzle: Swizzle, start: int, size: int) -> NDArray[np.intp]:
    """Permutation of the range's 16-byte chunks: chunk i of the unswizzled bytes [start, start + size) lies
    in chunk result[i] of the same range, and the other way round.

    intp [size / 16], read-only. Raises InputError where the range is not closed: it must begin and end at a
    multiple of the swizzle's span.
    """
    if start % swizzle.span or size % swizzle.span:
        raise invalid(
            f"{size} bytes at shared address {start:#x} with {swizzle}", f"multiples of {swizzle.span} bytes"
        )
    return _permutation(swizzle, start % swizzle.pattern, size // CHUNK)
