"""The tiles of queries that a block takes, one after another: the same for every role of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.fragment import computed_once
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.keys import KeyTiles, listed, spanned
from fa4flex.kernels.common.next_tile import (
    NextTile,
    finish,
    publish,
    publish_work,
    receive,
    receive_work,
    take,
)
from fa4flex.kernels.common.work import Grid, Work, dense_work, ordered_work, packed_work, with_lengths


class TileScheduler:
    """`config` has tile_m, tile_n, lengths, tables, dynamic and longest_first. `ctas` work on a tile
    together. `looped`: rows are looked at for their keys in a loop, in fewer registers. `group`: so many
    heads of queries share tiles, and heads of the grid are those of keys. `hands`: whoever takes a tile finds
    its head and its sequence for the others."""

    def __init__(
        self,
        config: Any,
        hooks: Hooks,
        ctas: int = 1,
        looped: bool = False,
        group: int = 1,
        hands: bool = False,
    ) -> None:
        self.config = config
        self.hooks = hooks
        self.ctas = ctas
        self.looped = looped
        self.group = group
        self.hands = hands

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        queries: int = self.config.tile_m // self.group
        return queries

    def first(self) -> Int32:
        """The number of a block's first tile."""
        return Int32(cute.arch.block_idx()[0] // self.ctas)

    def stride(self) -> Int32:
        """Number of tiles that are worked on at a time."""
        return Int32(cute.arch.grid_dim()[0] // self.ctas)

    @cute.jit
    def work(self, number: Int32, grid: Grid, arguments: Arguments) -> Work:
        """The tile of a number; not valid past the last."""
        exists = number < grid.total
        number = cutlass.min(number, grid.total - 1)
        if const_expr(arguments.order is not None):
            work = ordered_work(number, grid, arguments)
        elif const_expr(self.config.lengths == "packed"):
            work = packed_work(number, grid, arguments, self.queries, self.config.longest_first)
        else:
            work = dense_work(number, grid, arguments, self.config.longest_first)
        return work._replace(valid=work.valid & exists)

    @cute.jit
    def walk(
        self,
        grid: Grid,
        arguments: Arguments,
        next_tile: cutlass.Constexpr[NextTile],
        body: cutlass.Constexpr[Callable[..., Any]],
        carry: Any,
        takes: cutlass.Constexpr[bool] = False,
    ) -> Any:
        """Calls carry = body(work, phase, carry) for each tile of the block; phase is 0 and 1 in turn. One
        warp `takes` the numbers of tiles and hands them to the others."""
        phase = Int32(0)
        number = self.first()
        work = self.work(number, grid, arguments)
        while work.valid:
            carry = body(work, phase, carry)
            if const_expr(takes):
                # Not before the keys of this tile are asked for: the next one would wait for the end of this
                # while other blocks run out of tiles. At 16k, two heads in a section, the last block ended
                # 10 % late.
                number = self.take(number, arguments, next_tile, phase)
                if const_expr(not self.hands):
                    self.publish(number, next_tile, phase)
            elif const_expr(not self.hands):
                number = self.receive(number, next_tile, phase)
            if const_expr(self.hands and not takes):
                work = with_lengths(receive_work(next_tile, phase), arguments)
            else:
                work = self.work(number, grid, arguments)
                if const_expr(self.hands):
                    publish_work(work, next_tile, phase ^ 1)
            phase ^= 1
        if const_expr(takes):
            self.finish(arguments)
        return carry

    @cute.jit
    def take(
        self, number: Int32, arguments: Arguments, next_tile: cutlass.Constexpr[NextTile], phase: Int32
    ) -> Int32:
        """One warp's: the number of this block's next tile."""
        following = number + self.stride()
        if const_expr(self.config.dynamic):
            following = take(arguments.counters, self.stride())
        return following

    @cute.jit
    def publish(self, following: Int32, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> None:
        """The same warp's: hand the number to the others, once they have read the last one."""
        if const_expr(self.config.dynamic):
            publish(following, next_tile, phase ^ 1)

    @cute.jit
    def receive(self, number: Int32, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> Int32:
        """The others': the number of this block's next tile."""
        following = number + self.stride()
        if const_expr(self.config.dynamic):
            following = receive(next_tile, phase)
        return following

    @cute.jit
    def finish(self, arguments: Arguments) -> None:
        """The taking warp's: the last block to run out of tiles leaves the counters as they were found."""
        if const_expr(self.config.dynamic):
            finish(arguments.counters, self.stride())

    def place(self, work: Work, grid: Grid, arguments: Arguments) -> At:
        """Hook arguments for a tile, with the uniform terms: of heads that share tiles, for the first."""
        first = work if self.group == 1 else work._replace(h=work.h * self.group)
        return self.place_of(first, grid, arguments)

    def place_of(self, work: Work, grid: Grid, arguments: Arguments) -> At:
        """The same for one of these heads, `work.h`."""
        heads = grid.heads if self.group == 1 else grid.heads * self.group
        return place(self.hooks, work, heads, arguments)

    def keys(self, at: At, work: Work, arguments: Arguments) -> KeyTiles:
        if arguments.tables is not None:
            return listed(arguments.tables, at, work.tile)
        queries = self.queries
        return spanned(self.hooks, at, work.tile * queries, queries, self.config.tile_n, self.looped)


def place(hooks: Hooks, work: Work, heads: Int32, arguments: Arguments) -> At:
    """Hook arguments for the queries of a head, with the uniform terms."""
    at = At(
        b=work.b,
        h=work.h,
        q_len=work.q_len,
        kv_len=work.kv_len,
        num_heads=heads,
        scale=arguments.scale,
        operands=tuple(arguments.operands),
        scalars=tuple(arguments.scalars),
    )
    if hooks.uniform is None:
        return at
    found = hooks.uniform(at)
    return at.but(uniform=tuple(computed_once(x) if isinstance(x, Float32) else x for x in found))
