"""The n-th largest key of many, digit by digit, by a block: of 8 bits each, the highest first.

Keys whose higher digits are those of the one that is looked for are counted by their next digit. Lanes of a
warp count apart, so that keys which are alike, as scores of a row are, do not wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr, select_

from fa4flex.kernels.topk.config import LongConfig
from fa4flex.kernels.topk.rows import NONE, Rule, key_of

BINS, BITS = 256, 8
LANES = 32
EACH = BINS // LANES
"""Bins of a lane of the warp that looks for the bin."""

THREADS = LongConfig.threads


class Counts(NamedTuple):
    """In shared memory, int32: keys of each digit [BINS, LANES], of all lanes [BINS], and what was found
    [4]."""

    lanes: cute.Tensor
    bins: cute.Tensor
    found: cute.Tensor


class Nth(NamedTuple):
    """A key; which of those that are equal to it is looked for, from 1; and how many of these there are."""

    key: Int32
    rank: Int32
    equal: Int32


class Held(NamedTuple):
    """Keys of `size` units in shared memory, and their numbers."""

    keys: cute.Tensor
    units: cute.Tensor
    size: Int32

    def key(self, i: Int32) -> Int32:
        return self.keys[i]

    def unit(self, i: Int32) -> Int32:
        return self.units[i]


class Whole(NamedTuple):
    """All units of a row that may be selected."""

    scores: cute.Tensor
    size: Int32
    rule: Rule | None

    def key(self, i: Int32) -> Int32:
        return key_of(Float32(self.scores[i]), i, self.rule)

    def unit(self, i: Int32) -> Int32:
        return i


class Equal(NamedTuple):
    """Units of others, of a row of so many `units`, that have a key: lower units have larger keys among
    them."""

    among: Held | Whole
    wanted: Int32
    units: Int32

    @property
    def size(self) -> Int32:
        return self.among.size

    def key(self, i: Int32) -> Int32:
        mine = self.among.key(i) == self.wanted
        return Int32(select_(mine, self.units - self.among.unit(i), Int32(NONE)))


@cute.jit
def nth_largest(among: Held | Whole | Equal, n: Int32, counts: Counts, thread: Int32) -> Nth:
    """The key of number n from the largest, of which there are n at least that are not NONE. All threads of
    the block take part, and have met since anything of `counts` was read or keys were written."""
    prefix, rank, equal = Int32(0), n, Int32(0)
    for digit in range_constexpr(32 // BITS):
        shift = 32 - BITS * (digit + 1)
        for i in cutlass.range(thread, BINS * LANES, THREADS, unroll=1):
            counts.lanes[i // LANES, i % LANES] = Int32(0)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, among.size, THREADS, unroll=1):
            key = among.key(i)
            alike = key != NONE
            if const_expr(digit > 0):
                alike = alike & (((key ^ prefix) >> (shift + BITS)) == 0)
            if alike:
                place = counts.lanes.iterator + (_digit(key, shift) * LANES + thread % LANES)
                cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        _find(counts, rank, thread)
        rank, equal = counts.found[1], counts.found[2]
        prefix = prefix | ((counts.found[0] ^ (BINS // 2 if digit == 0 else 0)) << shift)
    return Nth(prefix, rank, equal)


def _digit(key: Int32, shift: int) -> Int32:
    """A digit; the highest one ascends with the number, whose sign it has."""
    digit = (key >> shift) & (BINS - 1)
    return digit ^ (BINS // 2) if shift == 32 - BITS else digit


@cute.jit
def _find(counts: Counts, rank: Int32, thread: Int32) -> None:
    """Note the bin of the key of number `rank` from the largest, its number within it, and its keys."""
    if thread < BINS:
        total = Int32(0)
        for i in cutlass.range(LANES, unroll=4):
            total = total + counts.lanes[thread, (i + thread) % LANES]
        counts.bins[thread] = total
    cute.arch.sync_threads()
    if thread < LANES:
        top, mine = BINS - 1 - EACH * thread, Int32(0)
        for i in range_constexpr(EACH):
            mine = mine + counts.bins[top - i]
        upto = mine
        for step in range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=0)
            upto = select_(thread >= (1 << step), upto + other, upto)
        before = upto - mine
        for i in range_constexpr(EACH):
            here = counts.bins[top - i]
            if before < rank and before + here >= rank:
                counts.found[0] = top - i
                counts.found[1] = rank - before
                counts.found[2] = here
                counts.found[3] = Int32(0)  # all four are read at once
            before = before + here
    cute.arch.sync_threads()
