"""The tiles of a mixed batch, as its blocks take them.

A sequence whose queries, times the heads that share keys, are few has one tile for each KV head, or if
it has many keys several, which share these; others have one for each head and 128 queries. Tiles of few rows
wait for memory, those of many for tensor cores. At any time some blocks should have one kind and some the
other, so tile n of a launch is one of few rows where their share of the tiles up to n passes a whole number.
If one kind takes longer, more blocks have it at a time. Tiles of few rows run out first, one tile of each
block before the end: the last tiles of many rows are the shortest of all.

One warp of a block counts sequences, takes tiles, and hands each to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile, take
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work, packed_tile
from fa4flex.kernels.mixed_sm90.config import Config
from fa4flex.kernels.mixed_sm90.handed import (
    FEW,
    FEW_AT,
    MANY,
    MANY_AT,
    NONE,
    SPARE,
    TOTALS,
    Handed,
    Noted,
    hand,
    handed,
    note,
    noted,
    noted_place,
    nothing,
)
from fa4flex.kernels.mixed_sm90.sequences import WHOLE, Cut, Sequences, Totals, start

Bodies = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions that a role calls with a tile of few rows (work, cut, phase, carry), and with one of many (work,
phase, carry)."""


RATE_BITS = 30
"""Bits behind the point of the share of tiles that are of few rows. A launch has fewer than 2^30 tiles."""


def rate(totals: Totals, workers: int) -> Int32:
    """Share of tiles of few rows, rounded up, until there are none left. Found once: a division of 64 bits
    takes longer than all else that begins a tile."""
    last = cutlass.min(totals.many // 4, Int32(workers))
    among = Int64(cutlass.max(totals.few + totals.many - last, Int32(1)))
    return Int32(((Int64(totals.few) << RATE_BITS) + (among - 1)) // among)


class MixedScheduler(TileScheduler):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        self.sequences = Sequences(config)

    @cute.jit
    def walk(
        self,
        grid: Grid,
        arguments: Arguments,
        next_tile: cutlass.Constexpr[NextTile],
        body: cutlass.Constexpr[Bodies],
        carry: Any,
        takes: cutlass.Constexpr[bool] = False,
    ) -> Any:
        """The same; `body` has one for each kind of tile, and the first tile is handed over like others."""
        if const_expr(takes):
            carry = self.lead(arguments, next_tile, body, carry)
        else:
            carry = self.follow(next_tile, body, carry)
        return carry

    @cute.jit
    def lead(
        self,
        arguments: Arguments,
        next_tile: cutlass.Constexpr[NextTile],
        body: cutlass.Constexpr[Bodies],
        carry: Any,
    ) -> Any:
        of_few, of_many = body
        if self.first() == 0:
            self.sequences.check(arguments)
        totals = self.sequences.totals(arguments)
        none = (Int32(0),) * SPARE
        mix = totals.few, rate(totals, self.config.workers), totals.share
        note((*mix, *start(), *start(), *none), TOTALS, next_tile)
        phase, number = Int32(0), self.first()
        while number < totals.few + totals.many:
            few, index = self.kind(number, noted(next_tile))
            if few:
                work, cut = self.few(index, arguments, next_tile)
                hand(Handed(Int32(FEW), work, cut), next_tile, phase)
                carry = of_few(work, cut, phase, carry)
            else:
                work = self.many(index, arguments, next_tile)
                hand(Handed(Int32(MANY), work, nothing().cut), next_tile, phase)
                carry = of_many(work, phase, carry)
            # Not before the keys of this tile are asked for: as of `TileScheduler.walk`.
            number = take(arguments.counters, self.stride())
            phase ^= 1
        hand(nothing(), next_tile, phase)
        self.finish(arguments)
        return carry

    @cute.jit
    def kind(self, number: Int32, noted: Noted) -> tuple[Boolean, Int32]:
        """(whether tile `number` is one of few rows, its number among its kind)."""
        before, upto = (
            cutlass.min(Int32(Int64(n) * Int64(noted.rate) >> RATE_BITS), noted.few)
            for n in (number, number + 1)
        )
        few = upto > before
        return few, select_(few, before, number - before)

    @cute.jit
    def follow(
        self, next_tile: cutlass.Constexpr[NextTile], body: cutlass.Constexpr[Bodies], carry: Any
    ) -> Any:
        of_few, of_many = body
        phase, kind = Int32(0), Int32(MANY)
        while kind != NONE:
            tile = handed(next_tile, phase)
            kind = tile.kind
            if kind == FEW:
                carry = of_few(tile.work, tile.cut, phase, carry)
            elif kind == MANY:
                carry = of_many(tile.work, phase, carry)
            phase ^= 1
        return carry

    @cute.jit
    def few(
        self, index: Int32, arguments: Arguments, next_tile: cutlass.Constexpr[NextTile]
    ) -> tuple[Work, Cut]:
        """All KV heads of a part of a sequence one after another; `h` of the work is one of those."""
        heads, share = Int32(arguments.k.shape[2]), noted(next_tile).share
        at = noted_place(FEW_AT, next_tile)
        part, at = self.sequences.find(index // heads, at, arguments, share, "few")
        note(at, FEW_AT, next_tile)
        kv_head = index % heads
        parts, rows = self.sequences.parts(at.b, arguments, share)
        first = at.rows * heads + (kv_head * parts + part) * rows
        work = packed_tile(arguments, Int32(0), kv_head, at.b, Boolean(True))
        return work, Cut(part, parts, first, at.split * heads + kv_head)

    @cute.jit
    def many(self, index: Int32, arguments: Arguments, next_tile: cutlass.Constexpr[NextTile]) -> Work:
        """The last tile of a sequence comes first where it has most keys; all heads of it, one after the
        other."""
        heads, at = Int32(arguments.q.shape[1]), noted_place(MANY_AT, next_tile)
        tile, at = self.sequences.find(index // heads, at, arguments, Int32(WHOLE), "many")
        note(at, MANY_AT, next_tile)
        if const_expr(self.config.longest_first):
            tile = self.sequences.tiles(at.b, arguments) - 1 - tile
        return packed_tile(arguments, tile, index % heads, at.b, Boolean(True))
