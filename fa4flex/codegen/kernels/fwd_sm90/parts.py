"""What the roles of the Hopper forward kernel share: tensors, barriers and pipelines of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.codegen.kernels.common.arguments import Arguments
from fa4flex.codegen.kernels.common.fragment import computed_once
from fa4flex.codegen.kernels.common.hooks import At, Hooks
from fa4flex.codegen.kernels.common.keys import KeyTiles, listed, spanned
from fa4flex.codegen.kernels.common.work import Grid, Work, dense_work, packed_work
from fa4flex.codegen.kernels.fwd_sm90.config import Config

ROWS = 64
"""Query rows of one consumer warpgroup: what one wgmma instruction spans."""


@dataclass(frozen=True)
class Shared:
    """Shared memory: q and out (64, width, warpgroup), k (tile_n, head_dim, stage), v (head_dim_v, tile_n,
    stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor


@dataclass(frozen=True)
class Pipes:
    """k and v rings, and two barriers per warpgroup: its queries have come; they are no longer needed. The
    number of the next tile goes from the producer to the consumers through `next`, between two barriers."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q_full: cute.Pointer
    q_empty: cute.Pointer
    next: cute.Tensor
    next_full: cute.Pointer
    next_empty: cute.Pointer


@dataclass(frozen=True)
class Transfers:
    """TMA descriptors with the global tensors they move: q, k, out (S, D, H, B), v (D, S, H, B); packed
    tensors are (T, D, H) and (D, T, H)."""

    q: Any
    k: Any
    v: Any
    out: Any


def partition(
    transfer: cpasync.TmaInfo, shared: cute.Tensor, tiles: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(shared, global) views of what a transfer moves, whose last mode counts stages and tiles."""
    return cpasync.tma_partition(
        transfer.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )


def sequence(tensor: cute.Tensor, offset: Int32, head: Int32, b: Int32, axis: int = 0) -> cute.Tensor:
    """One head of one sequence, its tokens along `axis` starting at `offset`."""
    if cute.rank(tensor) == 4:
        return tensor[None, None, head, b]
    one = tensor[None, None, head]
    return cute.domain_offset((offset, 0) if axis == 0 else (0, offset), one)


class Course:
    """The tiles of queries that a block takes, one after another: the same for every role."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def work(self, number: Int32, grid: Grid, arguments: Arguments) -> Work:
        """The tile of a number; not valid past the last."""
        exists = number < grid.total
        number = cutlass.min(number, grid.total - 1)
        if const_expr(self.config.lengths == "packed"):
            work = packed_work(number, grid, arguments, self.config.tile_m)
        else:
            work = dense_work(number, grid, arguments, self.config.longest_first)
        return work._replace(valid=work.valid & exists)

    @cute.jit
    def take(self, number: Int32, arguments: Arguments) -> Int32:
        """The producer's: the number of this block's next tile."""
        following = number + cute.arch.grid_dim()[0]
        if const_expr(self.config.dynamic):
            taken = Int32(0)
            if cute.arch.lane_idx() == 0:
                taken = cute.arch.atomic_add(arguments.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            following = cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(taken, 0)
        return following

    @cute.jit
    def publish(self, following: Int32, pipes: cutlass.Constexpr[Pipes], phase: Int32) -> None:
        """The producer's: hand the number to the consumers, once they have read the last one."""
        if const_expr(self.config.dynamic):
            cute.arch.mbarrier_wait(pipes.next_empty, phase)
            with cute.arch.elect_one():
                pipes.next[0] = following
                cute.arch.mbarrier_arrive(pipes.next_full)

    @cute.jit
    def receive(self, number: Int32, pipes: cutlass.Constexpr[Pipes], phase: Int32) -> Int32:
        """The consumers': the number of this block's next tile."""
        following = number + cute.arch.grid_dim()[0]
        if const_expr(self.config.dynamic):
            cute.arch.mbarrier_wait(pipes.next_full, phase)
            following = cute.arch.make_warp_uniform(pipes.next[0])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(pipes.next_empty)
        return following

    @cute.jit
    def finish(self, arguments: Arguments) -> None:
        """The producer's: the last block to run out of tiles leaves the counter as it was found."""
        if const_expr(self.config.dynamic):  # noqa: SIM102  one is decided when compiled, one when run
            if cute.arch.lane_idx() == 0:
                counter = arguments.counter
                done = cute.arch.atomic_add(counter.iterator + 1, Int32(1), sem="acq_rel", scope="gpu")
                if done == cute.arch.grid_dim()[0] - 1:
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
        return spanned(self.hooks, at, first_row, self.config.tile_m, self.config.tile_n)
