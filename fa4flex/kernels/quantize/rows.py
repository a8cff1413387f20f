"""Rows of heads in registers: loaded, rotated, and divided by their scales.

Threads next to each other, `lanes` of them, have LANE channels each of a row. All numbers are lists of
float32, as long as a thread's share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, cute

from fa4flex.kernels.common.fragment import pack_four, widened
from fa4flex.kernels.common.math import absolute, where
from fa4flex.kernels.quantize.config import LANE, LARGEST, lanes

Row = list[Float32]
WARP = 32

NEAR, FAR, AWAY = 2.0**-60, 2.0**60, 2.0**100
"""Divisors between the first two are used as they are; smaller ones are multiplied by the last, larger ones
divided by it: no product or difference of `quotients` leaves the range of float32 then."""


def words_of(row: cute.Tensor, lane: Int32, width: int) -> list[Int32]:
    """A thread's share of a row [width] of 16 bits, two elements a word. Threads past its end have zeros."""
    used = width // LANE
    held = cute.make_rmem_tensor((LANE,), row.element_type)
    at = lane if used == lanes(width) else where(lane < used, lane, Int32(used - 1))
    cute.autovec_copy(cute.logical_divide(row, cute.make_layout(LANE))[None, at], held)
    words = cute.recast_tensor(held, Int32)
    found = [words[i] for i in range(LANE // 2)]
    if used != lanes(width):
        found = [where(lane < used, x, Int32(0)) for x in found]
    return found


def numbers_of(words: list[Int32], kind: type) -> Row:
    return [x for word in words for x in widened(word, kind)]


def floats_of(row: cute.Tensor, lane: Int32, width: int) -> Row:
    """A thread's share of a row [width] of float32; threads past its end have those of the last."""
    used = width // LANE
    held = cute.make_rmem_tensor((LANE,), Float32)
    at = lane if used == lanes(width) else where(lane < used, lane, Int32(used - 1))
    cute.autovec_copy(cute.logical_divide(row, cute.make_layout(LANE))[None, at], held)
    return [held[i] for i in range(LANE)]


# --- rotation -----------------------------------------------------------------------------------------------


def block_of(width: int) -> int:
    """Channels that are rotated together: see fa4flex/quantization/rotation.py."""
    return width & -width


def factors_of(signs: Row, width: int) -> Row:
    """Signs over the root of the block: what the matrix multiplies before it adds."""
    root = Float32(1.0 / math.sqrt(block_of(width)))
    return [x * root for x in signs]


def rotated(x: Row, factors: Row, lane: Int32, width: int) -> Row:
    """The share of a Hadamard matrix times the row: sums and differences, of a thread's own channels first,
    of those of threads after that."""
    x = [a * b for a, b in zip(x, factors, strict=True)]
    bit = 1
    while bit < LANE:
        for i in range(LANE):
            if not i & bit:
                x[i], x[i | bit] = x[i] + x[i | bit], x[i] - x[i | bit]
        bit *= 2
    distance = 1
    while distance * LANE < block_of(width):
        side = where((lane & distance) == 0, Float32(1.0), Float32(-1.0))
        x = [cute.math.fma(a, side, cute.arch.shuffle_sync_bfly(a, offset=distance)) for a in x]
        distance *= 2
    return x


# --- greatest numbers and sums ------------------------------------------------------------------------------


def greater(a: Float32, b: Float32) -> Float32:
    """The greater one; NaN if one is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def greatest(x: Row) -> Float32:
    """Greatest absolute value of a list; NaN if one is NaN."""
    found = absolute(x[0])
    for a in x[1:]:
        found = greater(found, absolute(a))
    return found


def greatest_of_lanes(x: Float32, count: int) -> Float32:
    """The same over `count` threads next to each other."""
    return cute.arch.warp_reduction(x, greater, threads_in_group=count)


# --- codes --------------------------------------------------------------------------------------------------


class Divisor(NamedTuple):
    """A scale, times a power of two by which numbers are multiplied as well; minus its reciprocal; and
    whether the scale is a number."""

    scale: Float32
    reciprocal: Float32
    factor: Float32
    finite: Boolean


def scale_of(most: Float32, qk: str) -> Float32:
    """Scale by which the greatest absolute value is the format's greatest number; 1 of zeros."""
    return where(most == 0.0, Float32(1.0), most / Float32(LARGEST[qk]))


def divisor_of(scale: Float32) -> Divisor:
    small, large = scale < NEAR, scale > FAR
    factor = where(small, Float32(AWAY), where(large, Float32(1 / AWAY), Float32(1.0)))
    near = scale * factor
    # A scale of 0 is that of numbers so small that a 127th of them is none: they are its largest codes.
    reciprocal = where(near == 0.0, Float32(2.0**126), Float32(1.0) / near)
    return Divisor(near, reciprocal, factor, scale < Float32.inf)


def quotients(x: Row, by: Divisor) -> Row:
    """x / scale, rounded to nearest as a division is, where the quotient is no less than 2^-20: the
    remainder of a product with the reciprocal is exact, and corrects it (Markstein 1990)."""
    found = []
    for a in x:
        a = a * by.factor
        near = a * by.reciprocal
        rest = cute.math.fma(near, by.scale, -a)  # in this order, -0 stays what it is
        found.append(cute.math.fma(rest, -by.reciprocal, near))
    return found


def word_of(x: Row, kind: str) -> Int32:
    """Codes of four quotients, the first one lowest, rounded to nearest even and clamped."""
    return pack_four(*x) if kind == "float8_e4m3" else _int8(x)


def _int8(x: Row) -> Int32:
    """Rounded to nearest even, and within -127 and 127."""
    lines = [f"cvt.rni.s32.f32 n{i}, {{$r{i}}}; max.s32 n{i}, n{i}, -127;" for i in range(4)]
    word: Int32 = cute.arch.inline_ptx(
        "{ .reg .s32 n0, n1, n2, n3; .reg .b32 upper; "
        + " ".join(lines)
        + " cvt.pack.sat.s8.s32.b32 upper, n3, n2, 0; cvt.pack.sat.s8.s32.b32 {$w0}, n1, n0, upper; }",
        write_only_types=[Int32],
        read_only_args=x,
    )
    return word
