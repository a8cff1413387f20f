"""The tiles of queries that a block takes, one after another: the same for every role of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from fa4flex.codegen.kernels.common.arguments import Arguments
from fa4flex.codegen.kernels.common.fragment import computed_once
from fa4flex.codegen.kernels.common.hooks import At, Hooks
from fa4flex.codegen.kernels.common.keys import KeyTiles, listed, spanned
from fa4flex.codegen.kernels.common.work import Grid, Work, dense_work, ordered_work, packed_work


@dataclass(frozen=True)
class NextTile:
    """Where the number of the next tile is handed over, int32 [1], between two barriers: it is there, and
    every warp has read it."""

    number: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


class Course:
    """`config` has tile_m, tile_n, lengths, tables, dynamic and longest_first. `ctas` work on a tile
    together. `looped`: rows are looked at for their keys in a loop, in fewer registers."""

    def __init__(self, config: Any, hooks: Hooks, ctas: int = 1, looped: bool = False) -> None:
        self.config = config
        self.hooks = hooks
        self.ctas = ctas
        self.looped = looped

    def first(self) -> Int32:
        """The number of a block's first tile."""
        return Int32(cute.arch.block_idx()[0] // self.ctas)

    def stride(self) -> Int32:
        """How many tiles are worked on at a time."""
        return Int32(cute.arch.grid_dim()[0] // self.ctas)

    @cute.jit
    def work(self, number: Int32, grid: Grid, arguments: Arguments) -> Work:
        """The tile of a number; not valid past the last."""
        exists = number < grid.total
        number = cutlass.min(number, grid.total - 1)
        if const_expr(arguments.order is not None):
            work = ordered_work(number, grid, arguments)
        elif const_expr(self.config.lengths == "packed"):
            work = packed_work(number, grid, arguments, self.config.tile_m)
        else:
            work = dense_work(number, grid, arguments, self.config.longest_first)
        return work._replace(valid=work.valid & exists)

    @cute.jit
    def take(self, number: Int32, arguments: Arguments) -> Int32:
        """One warp's: the number of this block's next tile."""
        following = number + self.stride()
        if const_expr(self.config.dynamic):
            taken = Int32(0)
            if cute.arch.lane_idx() == 0:
                taken = cute.arch.atomic_add(arguments.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            following = self.stride() + cute.arch.shuffle_sync(taken, 0)
        return following

    @cute.jit
    def publish(self, following: Int32, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> None:
        """The same warp's: hand the number to the others, once they have read the last one."""
        if const_expr(self.config.dynamic):
            cute.arch.mbarrier_wait(next_tile.empty, phase)
            with cute.arch.elect_one():
                next_tile.number[0] = following
                cute.arch.mbarrier_arrive(next_tile.full)

    @cute.jit
    def receive(self, number: Int32, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> Int32:
        """The others': the number of this block's next tile."""
        following = number + self.stride()
        if const_expr(self.config.dynamic):
            cute.arch.mbarrier_wait(next_tile.full, phase)
            following = cute.arch.make_warp_uniform(next_tile.number[0])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(next_tile.empty)
        return following

    @cute.jit
    def finish(self, arguments: Arguments) -> None:
        """The taking warp's: the last block to run out of tiles leaves the counter as it was found."""
        if const_expr(self.config.dynamic):  # noqa: SIM102  one is decided when compiled, one when run
            if cute.arch.lane_idx() == 0:
                counter = arguments.counter
                done = cute.arch.atomic_add(counter.iterator + 1, Int32(1), sem="acq_rel", scope="gpu")
                if done == self.stride() - 1:
                    counter[0] = Int32(0)
                    counter[1] = Int32(0)

    def place(self, work: Work, grid: Grid, arguments: Arguments) -> At:
        """Where hooks are called for a tile, with the uniform terms."""
        at = At(
            b=work.b,
            h=work.h,
            q_len=work.q_len,
            kv_len=work.kv_len,
            num_heads=grid.heads,
            scale=arguments.scale,
            operands=tuple(arguments.operands),
            scalars=tuple(arguments.scalars),
        )
        if self.hooks.uniform is None:
            return at
        found = self.hooks.uniform(at)
        return at.but(uniform=tuple(computed_once(x) if isinstance(x, Float32) else x for x in found))

    def keys(self, at: At, work: Work, arguments: Arguments) -> KeyTiles:
        if arguments.tables is not None:
            return listed(arguments.tables, at, work.tile)
        first_row = work.tile * self.config.tile_m
        return spanned(self.hooks, at, first_row, self.config.tile_m, self.config.tile_n, self.looped)
