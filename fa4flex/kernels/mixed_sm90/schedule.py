"""The tiles of a mixed batch: tiles of few rows spread evenly among tiles of many.

A sequence whose queries, times the heads that share keys, are few has one tile for each head of keys; others
have one for each head and 128 queries. Tiles of few rows wait for memory, those of many for tensor cores. At
any time some blocks should have one kind and some the other, so tile n of a launch is one of few rows where
their share of the tiles up to n passes a whole number. If one kind takes longer, more blocks have it at a
time; both run out together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work, packed_tile


class Place(NamedTuple):
    """Sequence from which on the next tiles of a kind are looked for, and number of such tiles before it, per
    head. Blocks take tiles in rising order, so no sequence is looked at twice."""

    b: Int32
    before: Int32


class Totals(NamedTuple):
    """Tiles of few rows, and of many, of all heads."""

    few: Int32
    many: Int32


Bodies = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions that a role calls with a tile of few rows, and with one of many."""


class MixedScheduler(TileScheduler):
    """`config` has few_rows besides."""

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
        totals = self.totals(arguments)
        phase, number = Int32(0), self.first()
        few_at, many_at = Place(Int32(0), Int32(0)), Place(Int32(0), Int32(0))
        while number < totals.few + totals.many:
            few, index = self.kind(number, totals)
            following = number
            if const_expr(takes):
                following = self.take(number, arguments, next_tile, phase)
            if few:
                work, few_at = self.few(index, few_at, arguments)
                carry = of_few(work, phase, carry)
            else:
                work, many_at = self.many(index, many_at, arguments)
                carry = of_many(work, phase, carry)
            if const_expr(takes):
                self.publish(following, next_tile, phase)
            else:
                following = self.receive(number, next_tile, phase)
            number = following
            phase ^= 1
        if const_expr(takes):
            self.finish(arguments)
        return carry

    def kind(self, number: Int32, totals: Totals) -> tuple[Boolean, Int32]:
        """(whether tile `number` is one of few rows, its number among its kind)."""
        every = Int64(cutlass.max(totals.few + totals.many, Int32(1)))
        before = Int32(Int64(number) * Int64(totals.few) // every)
        upto = Int32(Int64(number + 1) * Int64(totals.few) // every)
        few = upto > before
        return few, select_(few, before, number - before)

    @cute.jit
    def totals(self, arguments: Arguments) -> Totals:
        """A warp's: numbers of tiles."""
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        few, many = Int32(0), Int32(0)
        for b in cutlass.range(cute.arch.lane_idx(), sequences, 32, unroll=4):
            one, more = self.tiles(b, arguments)
            few, many = few + one, many + more
        few, many = (cute.arch.warp_redux_sync(x, "add") for x in (few, many))
        return Totals(few * Int32(arguments.k.shape[2]), many * Int32(arguments.q.shape[1]))

    def tiles(self, b: Int32, arguments: Arguments) -> tuple[Int32, Int32]:
        """(tiles of few rows, of many) of a sequence, per head."""
        length = arguments.cu_seqlens_q[b + 1] - arguments.cu_seqlens_q[b]
        if arguments.seqused_q is not None:
            length = cutlass.min(length, arguments.seqused_q[b])
        few = length * self.group(arguments) <= self.config.few_rows
        one = select_(few & (length > 0), Int32(1), Int32(0))
        return one, select_(few, Int32(0), Int32(cute.ceil_div(length, self.config.tile_m)))

    def group(self, arguments: Arguments) -> Int32:
        """Heads that share a head of keys."""
        return Int32(arguments.q.shape[1]) // Int32(arguments.k.shape[2])

    @cute.jit
    def few(self, index: Int32, at: Place, arguments: Arguments) -> tuple[Work, Place]:
        """All heads of keys of a sequence one after another; `h` of the work is one of those."""
        heads = Int32(arguments.k.shape[2])
        _, at = self.find(index // heads, at, arguments, True)
        return packed_tile(arguments, Int32(0), index % heads, at.b, Boolean(True)), at

    @cute.jit
    def many(self, index: Int32, at: Place, arguments: Arguments) -> tuple[Work, Place]:
        """All heads of a tile one after another; of a sequence, the last tile first where it has most
        keys."""
        heads = Int32(arguments.q.shape[1])
        tile, at = self.find(index // heads, at, arguments, False)
        work = packed_tile(arguments, tile, index % heads, at.b, Boolean(True))
        if const_expr(self.config.longest_first):
            last = Int32(cute.ceil_div(work.q_len, self.config.tile_m)) - 1
            work = work._replace(tile=last - tile)
        return work, at

    @cute.jit
    def find(
        self, wanted: Int32, at: Place, arguments: Arguments, few: cutlass.Constexpr[bool]
    ) -> tuple[Int32, Place]:
        """(tile of its sequence, sequence and tiles before it): 32 sequences at a time, one per lane."""
        sequences = Int32(arguments.cu_seqlens_q.shape[0] - 1)
        lane = cute.arch.lane_idx()
        b, before = at
        found = Boolean(False)
        while b < sequences and not found:
            mine = b + lane
            tiles = Int32(0)
            if mine < sequences:
                one, more = self.tiles(mine, arguments)
                tiles = one if const_expr(few) else more
            upto = tiles
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=0)
                upto = select_(lane >= (1 << step), upto + other, upto)
            past = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= wanted))
            found = past < 32
            whole = cute.arch.shuffle_sync(upto, cutlass.max(past - 1, Int32(0)))
            before = before + select_(past > 0, whole, Int32(0))
            b = b + past
        return wanted - before, Place(cutlass.min(b, sequences - 1), before)
