"""Configuration of the kernels that round q, k and v to codes of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 128
"""Tokens that a block rounds; of keys, those that share a scale."""

ROWS, LANE = 4, 16
"""Tokens that a thread has, and channels of each: a tile is 32 threads times these tall."""

TALL = TILE // ROWS

SHARED = 50
"""Percentage of a multiprocessor's memory that is shared, where several blocks have some."""

WIDEST = 256
"""The widest head: a block of 512 threads has a tile of it in registers."""

LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}
"""Greatest numbers of the formats."""


@dataclass(frozen=True)
class Config:
    """dtype      of q, k and v
    width      of q and k; a multiple of 32
    width_v    of v, a multiple of 16; 0 where v stays as it is
    qk         "int8" or "float8_e4m3"
    rotate     q and k are multiplied by signs and a Hadamard matrix
    center_k   the mean of the keys is taken out of them, and q times it is written
    center_v   the mean of the values is taken out of them, and what is to be added back is written
    together   elements of q, k and v that addresses and strides are multiples of
    """

    dtype: str = "bfloat16"
    width: int = 128
    width_v: int = 128
    qk: str = "int8"
    rotate: bool = True
    center_k: bool = True
    center_v: bool = True
    together: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return TALL * max(lanes(self.width), lanes(self.width_v))

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor: as many as leave 128 registers to a thread."""
        return max(1, 512 // self.threads)

    @property
    def carveout(self) -> int | None:
        """Percentage of its memory that is shared memory: the rest keeps halves of rows on their way."""
        return SHARED if self.blocks > 1 else None

    @property
    def sums(self) -> bool:
        """True if something is needed of all tokens of a sequence before one of them can be rounded."""
        return self.center_k or self.width_v > 0

    @property
    def offset(self) -> bool:
        """True if sums of codes are needed."""
        return self.center_v and self.width_v > 0


def lanes(width: int) -> int:
    """Threads next to each other that have a token: a power of two, of which the last may have nothing."""
    return 1 << (max(1, -(-width // LANE)) - 1).bit_length()
