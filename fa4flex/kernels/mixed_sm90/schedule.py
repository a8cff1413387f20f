"""The tiles of a mixed batch, as its blocks take them.

A sequence whose queries, times the heads that share keys, are few has one tile for each head of keys, or if
it has many keys several, which share these; others have one for each head and 128 queries. Tiles of few rows
wait for memory, those of many for tensor cores: at any time some blocks should have one kind and some the
other. Which a block takes next is an order's matter.

One warp of a block counts sequences, takes tiles, and hands each to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work, packed_tile
from fa4flex.kernels.mixed_sm90.config import Config
from fa4flex.kernels.mixed_sm90.handed import (
    FEW,
    FEW_AT,
    MANY,
    MANY_AT,
    NONE,
    TOTALS,
    Handed,
    hand,
    handed,
    note,
    noted,
    noted_place,
    nothing,
)
from fa4flex.kernels.mixed_sm90.orders import NONE as NO_NUMBER
from fa4flex.kernels.mixed_sm90.orders import ORDERS
from fa4flex.kernels.mixed_sm90.sequences import WHOLE, Cut, Sequences, start

Bodies = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions that a role calls with a tile of few rows (work, cut, phase, carry), and with one of many (work,
phase, carry)."""


class MixedScheduler(TileScheduler):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        self.sequences = Sequences(config)
        self.order = ORDERS[config.order]()

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
        totals = self.sequences.totals(arguments)
        begins = self.order.begins(totals)
        note((totals.few, totals.many, totals.share, begins, *start(), *start()), TOTALS, next_tile)
        phase, number = Int32(0), self.order.first(noted(next_tile))
        while number != NO_NUMBER:
            if number >= 0:
                work, cut = self.few(number, arguments, next_tile)
                hand(Handed(Int32(FEW), work, cut), next_tile, phase)
                carry = of_few(work, cut, phase, carry)
            else:
                work = self.many(-1 - number, arguments, next_tile)
                hand(Handed(Int32(MANY), work, nothing().cut), next_tile, phase)
                carry = of_many(work, phase, carry)
            # Not before the keys of this tile are asked for: as of `TileScheduler.walk`.
            number = self.order.following(number, noted(next_tile), arguments.counter)
            phase ^= 1
        hand(nothing(), next_tile, phase)
        self.order.finish(arguments.counter)
        return carry

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
        """All heads of keys of a part of a sequence one after another; `h` of the work is one of those."""
        heads, share = Int32(arguments.k.shape[2]), noted(next_tile).share
        at = noted_place(FEW_AT, next_tile)
        part, at = self.sequences.find(index // heads, at, arguments, share, "few")
        note(at, FEW_AT, next_tile)
        kv_head = index % heads
        parts, rows = self.sequences.parts(at.b, arguments, share)
        first = at.rows * heads + (kv_head * parts + part) * rows
        work = packed_tile(arguments, Int32(0), kv_head, at.b, Boolean(True))
        return work, Cut(part, parts, first)

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
