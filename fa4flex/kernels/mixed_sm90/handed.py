"""Tiles as one warp of a block hands them to the others: found once, in numbers of 32 bits."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.mixed_sm90.config import HANDED, NOTED
from fa4flex.kernels.mixed_sm90.sequences import Cut, Place

NONE, FEW, MANY = 0, 1, 2
"""Kinds of what is handed over: no further tile, one of few rows, one of many."""


class Handed(NamedTuple):
    """A tile's kind; where its rows and keys are; of few rows, the part of the keys."""

    kind: Int32
    work: Work
    cut: Cut


class Noted(NamedTuple):
    """Tiles of few rows, and their share of all (see `rate` in schedule.py); tiles of keys of a part."""

    few: Int32
    rate: Int32
    share: Int32


TOTALS = HANDED
FEW_AT = TOTALS + len(Noted._fields)
MANY_AT = FEW_AT + len(Place._fields)
SPARE = HANDED + NOTED - MANY_AT - len(Place._fields)
"""Places where a warp notes totals, and its last tile of each kind; and how many are left."""


@cute.jit
def note(
    numbers: tuple[Int32, ...], where: cutlass.Constexpr[int], next_tile: cutlass.Constexpr[NextTile]
) -> None:
    """One warp's, for itself: it has few registers."""
    with cute.arch.elect_one():
        for i, number in enumerate(numbers):
            next_tile.number[where + i] = number
    cute.arch.sync_warp()


def noted(next_tile: NextTile) -> Noted:
    return Noted(*(next_tile.number[TOTALS + i] for i in range(len(Noted._fields))))


def noted_place(where: int, next_tile: NextTile) -> Place:
    return Place(*(next_tile.number[where + i] for i in range(len(Place._fields))))


@cute.jit
def hand(tile: Handed, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> None:
    """One warp's: the next tile, once the others have read the last one."""
    work, cut = tile.work, tile.cut
    cute.arch.mbarrier_wait(next_tile.empty, phase ^ 1)
    with cute.arch.elect_one():
        said = tile.kind, work.tile, work.h, work.b, work.q_offset, work.q_len, work.kv_len, *cut
        for i, number in enumerate(said):
            next_tile.number[i] = number
        cute.arch.mbarrier_arrive(next_tile.full)


@cute.jit
def handed(next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> Handed:
    """The others': the next tile."""
    cute.arch.mbarrier_wait(next_tile.full, phase)
    said = cute.make_rmem_tensor((HANDED,), Int32)
    cute.autovec_copy(cute.local_tile(next_tile.number, (HANDED,), (0,)), said)
    kind, tile, h, b, q_offset, q_len, kv_len, *cut = (
        cute.arch.make_warp_uniform(said[i]) for i in range(7 + len(Cut._fields))
    )
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(next_tile.empty)
    return Handed(kind, Work(tile, h, b, q_offset, Int32(0), q_len, kv_len, Boolean(True)), Cut(*cut))


def nothing() -> Handed:
    zero = Int32(0)
    work = Work(zero, zero, zero, zero, zero, zero, zero, Boolean(False))
    return Handed(Int32(NONE), work, Cut(zero, zero, zero, zero))
