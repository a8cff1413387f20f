"""Configuration of the kernels of output functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa4flex.kernels.plan.lengths import Lengths

THREADS = 256
TOGETHER = 8
"""Elements of 16 bits that a thread reads and writes at once."""

BYTES = 16
"""Bytes of one access, and what addresses and strides of tensors read in pieces are multiples of."""

Adding = Literal["each", "row", "parts"]


@dataclass(frozen=True)
class Piecewise:
    """A captured tensor that threads read in pieces of TOGETHER channels: `index` names its dimensions, "b",
    "h", "q" and "kv" in any order, of which "kv" is the last."""

    slot: int
    index: tuple[str, ...]


@dataclass(frozen=True)
class Sum:
    """The gradient of a captured tensor.

    adding   "each": each element is read by one element of the output; "row": by one row, whose channels are
             summed; "parts": by more, of which sums of rows are written, [B, S, H], packed [T, H]
    dtype    of what is written: the tensor's, or float32 of parts
    index    dimensions of what is written, by names; () of parts
    pieces   TOGETHER channels are written at once
    """

    slot: int
    adding: Adding
    dtype: str
    index: tuple[str, ...] = ()
    pieces: bool = False

    @property
    def rank(self) -> int:
        """Dimensions of what is written, without the batch of parts."""
        return len(self.index)


@dataclass(frozen=True)
class Config:
    """width       channels of a head
    lengths      "dense", "packed" or "used"
    heads_inner  heads of a token lie closer together than tokens of a head do
    piecewise    captured tensors that are read in pieces
    sums         gradients, in the order of their slots; of backward passes
    """

    width: int
    lengths: Lengths = "dense"
    heads_inner: bool = False
    piecewise: tuple[Piecewise, ...] = ()
    sums: tuple[Sum, ...] = ()

    @property
    def packed(self) -> bool:
        return self.lengths == "packed"

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return self.width // TOGETHER

    @property
    def lanes(self) -> int:
        """Threads next to each other that take a row, a power of two: one piece each, or none."""
        return 1 << (self.pieces - 1).bit_length()

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return THREADS // self.lanes
