"""Bits of a tile's columns: a word tells of the columns of one row in a thread which of them take part.

A test of a bit costs half of a comparison, and two words hold the rows of a tile that is 128 keys wide.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

WORD = 32
"""Columns per word."""

RUN = 24
"""Most columns that words of runs of ones are made for: a shift by all of them must stay below 32."""


def bit(place: int) -> int:
    """The word with this bit alone, as the signed number that it is."""
    return 1 << place if place < WORD - 1 else -(1 << place)


def columns_below(limit: Int32) -> Int32:
    """Number of a lane's columns 0 1 8 9 16 17 ... below `limit`."""
    limit = cutlass.max(limit, Int32(0))
    return (limit >> 3) * 2 + cutlass.min(limit & 7, Int32(2))


def consecutive(limit: Int32) -> Int32:
    """Number of columns below `limit` where a lane has all of them, 0 1 2 ...; `ones` clips."""
    return limit


def between(lo: Int32 | None, hi: Int32, start: int) -> Int32:
    """Bit i is set where lo <= start + i < hi, for RUN columns."""
    below = ones(hi - start)
    return below if lo is None else below & ~ones(lo - start)


def word_between(lo: Int32 | None, hi: Int32, start: int) -> Int32:
    """Bit i is set where lo <= start + i < hi, for WORD columns."""
    below = _low_bits(hi - start)
    return below if lo is None else below & ~_low_bits(lo - start)


@dsl_user_op
def _low_bits(count: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word with `count` low bits set, none and WORD being the least and the most: a shift to the left loses
    its number of places from 32 on, and one instruction has no such limit."""
    count = cutlass.max(count, Int32(0))
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [count.ir_value(loc=loc, ip=ip)],
            "bmsk.clamp.b32 $0, 0, $1;",
            "=r,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def ones(count: Int32, most: int = RUN) -> Int32:
    """`count` ones, between none and `most`."""
    return (Int32(1) << cutlass.max(cutlass.min(count, Int32(most)), Int32(0))) - 1


def shifted(word: Int32, after: Int32, count: int) -> Int32:
    """The word of the columns from `count` on, of those of two words next to each other."""
    if count == WORD:
        return after
    low, high = Uint32(word) >> count, Uint32(after) << (WORD - count)
    return Int32(low | high)


@dsl_user_op
def with_bit(word: Int32, place: int, condition: Boolean, *, loc: Any = None, ip: Any = None) -> Int32:
    """`word`, and one bit more where the condition holds.

    One instruction under a predicate. Written as a choice of numbers, it becomes as many choices as the
    condition has parts.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [x.ir_value(loc=loc, ip=ip) for x in (word, Boolean(condition))],
            f"@$2 or.b32 $0, $1, {1 << place:#x};",
            "=r,0,b",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )
