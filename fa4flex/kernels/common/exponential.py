"""2^x in fp32 arithmetic, for a share of the scores (FlashAttention-4, arXiv 2603.05451, section 3.1.3).

A Blackwell multiprocessor computes 16 special functions a clock, as many as Hopper's, while its tensor cores
are twice as fast: at head width 128 the exponentials of a tile take as long as its products. So some of them
are computed elsewhere. Needs packed fp32 arithmetic: sm_100 and later.

2^x = 2^n 2^f with n = floor(x) (Cody and Waite's reduction). A polynomial of degree d gives 2^f, and n is
added to the exponent of its value. That is d + 7 instructions for a pair of scores, as sm_100a has them:
2 FMNMX and 2 LEA (shift and add) in the integer pipe, 3 FADD2 and d FFMA2 in the fp32 pipe.

Errors and their measurement: docs/notes/exponential.md, benchmarks/exponential.py.
"""

from __future__ import annotations

from cutlass import Float32, Int32, cute

LOWEST = -127.0
"""Argument at which results reach zero."""

WHOLE = float(2**23 + 2**22)
"""Added to |x| < 2^22, rounding down, it leaves floor(x) in the low bits, because from 2^23 to 2^24 the fp32
numbers are the integers. Its own lowest 9 bits, all that a shift by 23 keeps, are zeros."""

POLYNOMIALS: dict[int, tuple[float, ...]] = {
    3: (1.0, 0.695116699, 0.227645263, 0.0770668462),
    4: (1.0, 0.693044901, 0.2412799, 0.0522429682, 0.013426437),
    5: (1.0, 0.693151295, 0.240164593, 0.0557995141, 0.00901748147, 0.00186695158),
}
"""Coefficients by degree: fp32, of 1, f, f^2, ..., to nine digits, of least relative error on [0, 1).

The first is 1, so that f = 0 gives exactly 1. Hence 2^0 = 1; and where x <= -127 the exponent of 1, which is
127 in its bits, is lowered by 127, and +0 is left. At f = 1 all are below 2, so results never fall where n
steps.
"""

COLUMNS = 128
"""Columns of a row of scores in a thread."""

FRAGMENT = 32
"""Columns that are exponentiated, narrowed and stored together."""


def emulated(pair: int, every: int, count: int, skip: int, columns: int = COLUMNS) -> bool:
    """True if columns 2 pair and 2 pair + 1 of a row are for `exp2_pair`: a choice made while tracing.

    Of every `every` pairs of a fragment the last `count` are, but none in the first `skip` fragments, nor in
    the last. Special functions come first in a group because they are a queue, beside which the polynomials
    run. They have the ends of a row to themselves because a polynomial takes longer, which nothing hides when
    a row starts, nor when the tensor cores wait for the rest of it. With `count` 0 no pair is emulated.

    8, 2, 1 makes 8 of 64 pairs, an eighth; 4, 1, 0 makes 12.
    """
    fragment, place = divmod(2 * pair, FRAGMENT)
    inside = skip <= fragment < columns // FRAGMENT - 1
    return inside and place // 2 % every >= every - count


def exp2_pair(x0: Float32, x1: Float32, degree: int = 3) -> tuple[Float32, Float32]:
    """2^x0 and 2^x1 for x < 128, with the relative error of POLYNOMIALS[degree] from -126 on.

    Between -127 and -126 results are subnormal, too small by 2^-127 at most. From -127 down to -inf they are
    exactly 0: masked scores need no more care than with the hardware's exponential. NaN gives the bits
    0x7f7fffff, the largest number: infinite once it is rounded to 16 bits.
    """
    # max.NaN costs as much as max, which would make 0 of NaN
    x = (cute.arch.fmax(x0, LOWEST, nan=True), cute.arch.fmax(x1, LOWEST, nan=True))
    shifted = cute.arch.add_packed_f32x2(x, (WHOLE, WHOLE), rnd="rm")
    whole = cute.arch.sub_packed_f32x2(shifted, (WHOLE, WHOLE))
    fraction = cute.arch.sub_packed_f32x2(x, whole)
    *lower, leading = POLYNOMIALS[degree]
    value = (leading, leading)
    for coefficient in reversed(lower):
        value = cute.arch.fma_packed_f32x2(value, fraction, (coefficient, coefficient))
    return _scaled(value[0], shifted[0]), _scaled(value[1], shifted[1])


def _scaled(value: Float32, shifted: Float32) -> Float32:
    """value 2^n, for the n in the low bits of `shifted`: one LEA."""
    return ((shifted.bitcast(Int32) << 23) + value.bitcast(Int32)).bitcast(Float32)
