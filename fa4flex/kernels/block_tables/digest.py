"""Digests of the tensors that tables are made of: where all are the same as last time, tables stand.

A warp reads PART words of one tensor, and adds up two scrambled sums of them. A scrambler is a bijection of
the word for each place, so that one changed word always changes both sums; several leave both as they were
once in 2^64. Nothing here depends on how contents were written: torch counts no change by a replayed graph,
another library's kernel, or `.data`.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import AddressSpace, Boolean, Int32, Int64, Uint8, Uint32, cute, select_

from fa4flex.kernels.block_tables.config import PART

LONGEST = (1 << 31) - PART
"""Words of a tensor that is read; a longer one counts as changed."""

STEPS = (0x9E3779B1, 0x85EBCA77)
SCRAMBLERS = ((16, 0x7FEB352D, 15, 0x846CA68B, 16), (17, 0xED5AD4BB, 11, 0xAC4C1B51, 15))
"""Shifts and odd factors, in turn, of two scramblers of 32 bits: found by search for little bias (C. Wellons,
Prospecting for hash functions, 2018)."""


def stale(state: cute.Tensor, turn: Int32) -> Boolean:
    """True if tables have to be made in this turn. Launches of two threads may overtake each other: what was
    found in a later turn counts, too."""
    return (turn == 0) | (state[0] - turn >= 0)


@cute.jit
def compare_part(
    tensors: cutlass.Constexpr[tuple[cute.Tensor, ...]], state: cute.Tensor, turn: Int32, part: Int32
) -> None:
    """A warp's: compare one part of all of these tensors with its digest, which is written anew, and leave
    this turn where they differ. state int32: the last turn in which something had changed, and two sums for
    each part."""
    address, size, mine, first, unread = Int64(0), Int64(0), Int32(-1), Int32(0), Boolean(False)
    for x in tensors:
        found, readable = bytes_of(x)
        count = select_(readable, Int32((found + (4 * PART - 1)) // (4 * PART)), Int32(0))
        here = (part >= first) & (part < first + count)
        address, size = select_(here, x.iterator.toint(), address), select_(here, found, size)
        mine = select_(here, part - first, mine)
        first, unread = first + count, unread | ~readable
    lane = cute.arch.lane_idx()
    if unread and part == 0 and lane == 0:
        state[0] = turn
    if mine >= 0:
        sums = sums_of(address, size, mine)
        if lane == 0:
            place = 1 + 2 * part
            if state[place] != sums[0] or state[place + 1] != sums[1]:
                state[place], state[place + 1] = sums[0], sums[1]
                state[0] = turn


def bytes_of(x: cute.Tensor) -> tuple[Int64, Boolean]:
    """Bytes of a tensor, and whether they can be read as words: they lie behind each other."""
    count, compact = Int64(1), Boolean(True)
    for size, step in zip(reversed(x.shape), reversed(x.stride), strict=True):
        compact = compact & ((Int64(step) == count) | (Int32(size) == 1))
        count = count * Int64(size)
    count = count * (x.element_type.width // 8)
    readable = compact & (x.iterator.toint() % 4 == 0) & (count >= 4) & (count < 4 * LONGEST)
    return count, readable


@cute.jit
def sums_of(address: Int64, size: Int64, part: Int32) -> tuple[Int32, Int32]:
    """A warp's: both sums of the part of so many bytes. Behind the last whole word, a lane has one byte."""
    lane, count = cute.arch.lane_idx(), Int32(size // 4)
    words = cute.make_tensor(
        cute.make_ptr(Uint32, address, AddressSpace.gmem, assumed_align=4), cute.make_layout(count)
    )
    places = [part * PART + (step + lane) for step in range(0, PART, 32)]
    read = [words[cutlass.min(place, count - 1)] for place in places]
    sums = [Uint32(0), Uint32(0)]
    for place, word in zip(places, read, strict=True):
        sums = added(sums, place, word, place < count)
    rest, byte = Int32(size % 4), Uint32(0)
    last = (count // PART == part) & (lane < rest)
    if last:
        pointer = cute.make_ptr(Uint8, address, AddressSpace.gmem, assumed_align=1)
        byte = Uint32(cute.make_tensor(pointer, cute.make_layout(Int32(size)))[4 * count + lane])
    sums = added(sums, count + lane, byte, last)
    one, other = (cute.arch.warp_redux_sync(Int32(x), "add") for x in sums)
    return one, other


def added(sums: Any, place: Int32, word: Uint32, there: Boolean) -> list[Uint32]:
    """Both sums with a word at its place, if it is there."""
    return [
        x + select_(there, scrambled(word + Uint32(place) * Uint32(step), how), Uint32(0))
        for x, step, how in zip(sums, STEPS, SCRAMBLERS, strict=True)
    ]


def scrambled(x: Uint32, how: tuple[int, ...]) -> Uint32:
    first, factor, second, other, third = how
    x = (x ^ (x >> first)) * Uint32(factor)
    x = (x ^ (x >> second)) * Uint32(other)
    return x ^ (x >> third)
