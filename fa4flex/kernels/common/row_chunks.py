"""Rows of an accumulator on their way to global memory, 16 bytes a lane.

Of each 8 columns the four lanes of a row have two each, 4 bytes once they are rounded. Stored like that, a
row takes four instructions where one would do, and L2 half sectors. So lanes exchange first: of four times 8
columns each gets one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute, select_

from fa4flex.kernels.common.fragment import packed

LANES, COLUMNS, PAIR = 4, 8, 2
"""Lanes of a row; columns that they have together, and each of them."""


class Chunk(NamedTuple):
    """Elements of a lane that follow each other from `column` on."""

    column: Int32
    held: cute.Tensor


def chunks_of(row: cute.Tensor, kind: Any, lane: Int32) -> list[Chunk]:
    """All columns of a row, rounded to `kind`. All lanes of a warp come here, whoever has a row."""
    lane = lane % LANES
    return _of_words(row, kind, lane) if kind.width == 16 else _of_pairs(row, kind, lane)


def _of_pairs(row: cute.Tensor, kind: Any, lane: Int32) -> list[Chunk]:
    """Elements of 32 bits as they are, 8 bytes at a time."""
    found = []
    for c in range(0, cute.size(row), PAIR):
        held = cute.make_rmem_tensor((PAIR,), kind)
        for i in range(PAIR):
            held[i] = row[c + i].to(kind)
        found.append(Chunk(COLUMNS // PAIR * c + PAIR * lane, held))
    return found


def _of_words(row: cute.Tensor, kind: Any, lane: Int32) -> list[Chunk]:
    """Elements of 16 bits, exchanged in words of two. Tiles are multiples of 32 columns wide."""
    words = [packed(row[c], row[c + 1], kind) for c in range(0, cute.size(row), PAIR)]
    found = []
    for first in range(0, len(words), LANES):
        held = cute.make_rmem_tensor((COLUMNS,), kind)
        target = cute.recast_tensor(held, Int32)
        for i, word in enumerate(_exchanged(words[first : first + LANES], lane)):
            target[i] = word
        found.append(Chunk(COLUMNS * (first + lane), held))
    return found


def _exchanged(words: list[Int32], lane: Int32) -> list[Int32]:
    """Word l of lane i, for word i of lane l: a transpose of 4 x 4, by halves."""
    for distance in (1, 2):
        upper = lane // distance % 2 == 1
        for i in (i for i in range(LANES) if i & distance == 0):
            low, high = words[i], words[i + distance]
            other = cute.arch.shuffle_sync_bfly(select_(upper, low, high), offset=distance)
            words[i], words[i + distance] = select_(upper, other, low), select_(upper, high, other)
    return words


@cute.jit
def put_chunks(target: cute.Tensor, chunks: cutlass.Constexpr[list[Chunk]]) -> None:
    """Store a row's chunks. What a tile is wider than the tensor, which is a multiple of 8, is left out."""
    width = cute.size(target)
    for chunk in chunks:
        if chunk.column < width:
            count = cute.size(chunk.held)
            pieces = cute.logical_divide(target, cute.make_layout(count))
            cute.autovec_copy(chunk.held, pieces[None, chunk.column // count])
