"""The tiles of a mixed batch: tiles of few rows spread evenly among tiles of many.

A sequence whose queries, times the heads that share keys, are few has one tile for each head of keys, or if
it has many keys several, which share these; others have one for each head and 128 queries. Tiles of few rows
wait for memory, those of many for tensor cores. At any time some blocks should have one kind and some the
other, so tile n of a launch is one of few rows where their share of the tiles up to n passes a whole number.
If one kind takes longer, more blocks have it at a time; both run out together, or those of few rows before
the last short tiles of many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work, packed_tile
from fa4flex.kernels.mixed_sm90.config import SHORTEST, TAIL, Config
from fa4flex.kernels.mixed_sm90.sequences import Cut, Place, Sequences, Totals, start

Bodies = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions that a role calls with a tile of few rows (work, cut, phase, carry), and with one of many (work,
phase, carry)."""


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
        """The same; `body` has one for each kind of tile."""
        of_few, of_many = body
        totals = self.sequences.totals(arguments)
        phase, number = Int32(0), self.first()
        few_at, many_at = start(), start()
        while number < totals.few + totals.many:
            few, index = self.kind(number, totals)
            if few:
                work, cut, few_at = self.few(index, few_at, arguments, totals.share)
                carry = of_few(work, cut, phase, carry)
            else:
                work, many_at = self.many(index, many_at, arguments, totals)
                carry = of_many(work, phase, carry)
            if const_expr(takes):
                # Not before the keys of this tile are asked for: as of `TileScheduler.walk`.
                number = self.take(number, arguments, next_tile, phase)
                self.publish(number, next_tile, phase)
            else:
                number = self.receive(number, next_tile, phase)
            phase ^= 1
        if const_expr(takes):
            self.finish(arguments)
        return carry

    @cute.jit
    def kind(self, number: Int32, totals: Totals) -> tuple[Boolean, Int32]:
        """(whether tile `number` is one of few rows, its number among its kind). Where there are none of few,
        nothing is divided: a division of 64 bits takes longer than all else that begins a tile."""
        few, index = Boolean(False), number
        if totals.few > 0:
            spread = totals.few + totals.many
            if const_expr(self.config.order == "tail"):
                spread = spread - cutlass.min(totals.many // TAIL, self.stride())
            every = Int64(spread)
            before = Int32(Int64(cutlass.min(number, spread)) * Int64(totals.few) // every)
            upto = Int32(Int64(cutlass.min(number + 1, spread)) * Int64(totals.few) // every)
            few = upto > before
            index = select_(few, before, number - before)
        return few, index

    @cute.jit
    def few(self, index: Int32, at: Place, arguments: Arguments, share: Int32) -> tuple[Work, Cut, Place]:
        """All heads of keys of a part of a sequence one after another; `h` of the work is one of those."""
        heads = Int32(arguments.k.shape[2])
        part, at = self.sequences.find(index // heads, at, arguments, share, "few")
        kv_head = index % heads
        parts, rows = self.sequences.parts(at.b, arguments, share)
        first = at.rows * heads + (kv_head * parts + part) * rows
        work = packed_tile(arguments, Int32(0), kv_head, at.b, Boolean(True))
        return work, Cut(part, parts, first), at

    @cute.jit
    def many(self, index: Int32, at: Place, arguments: Arguments, totals: Totals) -> tuple[Work, Place]:
        """The last tile of a sequence comes first where it has most keys. The shortest ones are taken for all
        heads, one after the other. So are all, for balance, where no tile has few rows: then no other keys
        drive those of a chunk out of L2."""
        heads = Int32(arguments.q.shape[1])
        row, at = self.sequences.find(index // heads, at, arguments, totals.share, "many")
        tiles = self.sequences.tiles(at.b, arguments)
        tile, h = row, index % heads
        if const_expr(self.config.order != "tiles"):
            longest = select_(totals.few > 0, tiles - tiles // SHORTEST, Int32(0))
            if row < longest:
                tile, h = self.grouped(row * heads + h, longest, arguments)
        if const_expr(self.config.longest_first):
            tile = tiles - 1 - tile
        return packed_tile(arguments, tile, h, at.b, Boolean(True)), at

    def grouped(self, number: Int32, longest: Int32, arguments: Arguments) -> tuple[Int32, Int32]:
        """(tile, head of queries) of number `number` of a sequence's longest tiles, so many of each head:
        those of the heads of one head of keys after those of another."""
        group = self.sequences.group(arguments)
        each = longest * group
        return number % each // group, number // each * group + number % group
