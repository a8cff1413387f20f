"""Queries of a warp in registers, as float16 in the order in which bytes of keys are read."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float16, Float32, Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.fragment import packed, quad_reduce, widened
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.decode_fp8_sm90.config import span
from fa4flex.kernels.decode_fp8_sm90.instructions import read_words, write_words

LANES = 32
QUAD = 16
"""Bytes of a lane's operand for 16 elements."""

WIDE = 8
"""Elements of 16 bits that a lane copies at once."""

BIAS, TOP, LEAST = 127, 14, 15
"""Bias of float32 exponents; largest exponent that a row of queries is given; least that it is taken
for."""


class RegisterQueries:
    """Operands of a warp's products, kept in registers: words [row, number]."""

    def __init__(self, words: cute.Tensor) -> None:
        self.words = words

    def operand(self, index: int) -> list[Int32]:
        """The four words of a lane for 16 elements of its two rows."""
        return _operand(self.words, index)


class SharedQueries:
    """Operands kept in shared memory, where each lane reads what it has written itself."""

    def __init__(self, words: cute.Tensor, address: Int32, warp: Int32) -> None:
        count, lane = cute.size(words, mode=[1]) // 2, cute.arch.lane_idx()
        self.address = address + (warp * count * LANES + lane) * QUAD
        for index in range(count):
            write_words(self.address, index * LANES * QUAD, _operand(words, index))

    def operand(self, index: int) -> list[Int32]:
        return read_words(self.address, index * LANES * QUAD, 4)


def _operand(words: cute.Tensor, index: int) -> list[Int32]:
    return [words[r, 2 * index + half] for half in (0, 1) for r in (0, 1)]


def load_queries(
    arguments: Arguments, tile: Tile, rows: tuple[Any, ...], head_dim: int, lane: Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """[row, words], and what a row's products are multiplied by. Tiles may be wider than the tensor, and have
    zeros there. float16 takes all digits of bfloat16 where a row's largest element is below 2^15 and no other
    is 2^29 times smaller, so rows are multiplied by powers of two."""
    q, run = arguments.q, span(head_dim) // 4
    words = cute.make_rmem_tensor((2, head_dim // 8), Int32)
    lift = cute.make_rmem_tensor((2,), Float32)
    for r, mine in enumerate(rows):
        held = cute.make_rmem_tensor((WIDE, head_dim // 4 // WIDE), q.element_type)
        held.fill(q.element_type(0.0))
        for i in range(head_dim // 4 // WIDE):
            block, within = divmod(i * WIDE, run)
            piece = (block * span(head_dim) + within) // WIDE + lane % 4 * (run // WIDE)
            _copy(q[tile.b, mine.row.q, mine.row.h, None], piece, held[None, i])
        pairs = cute.recast_tensor(held, Int32)
        count = head_dim // 8
        lift[r] = Float32(1.0)
        if q.element_type is Float16:
            for i in range(count):
                words[r, i] = pairs[i]
        else:
            numbers = [widened(pairs[i], q.element_type) for i in range(count)]
            down, up = _powers([x for pair in numbers for x in pair])
            lift[r] = up
            for i, (low, high) in enumerate(numbers):
                words[r, i] = packed(low * down, high * down, Float16)
    return words, lift


@cute.jit
def _copy(row: cute.Tensor, piece: Int32, into: cute.Tensor) -> None:
    if piece * WIDE < cute.size(row):
        source = cute.logical_divide(row, cute.make_layout(WIDE))
        cute.autovec_copy(source[None, piece], into)


def _powers(numbers: list[Float32]) -> tuple[Float32, Float32]:
    """The power of two that takes the largest of a row to 2^TOP or above, but below twice that, and its
    inverse."""
    largest = Float32(0.0)
    for x in numbers:
        largest = cute.arch.fmax(largest, cute.math.absf(x))
    largest = quad_reduce(largest, cute.arch.fmax)
    exponent = largest.bitcast(Int32) >> 23
    exponent = cutlass.max(exponent, Int32(LEAST))
    down = ((2 * BIAS + TOP - exponent) << 23).bitcast(Float32)
    up = ((exponent - TOP) << 23).bitcast(Float32)
    return down, up
