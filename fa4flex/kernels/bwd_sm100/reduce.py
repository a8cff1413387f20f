"""The warpgroup that hands on each step's dQ: from tensor memory by way of shared memory, where the copy
engine takes it and adds it to global memory. Each warp has its own 32 rows, and its own pieces of them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS, Config
from fa4flex.kernels.bwd_sm100.resources import Shared, in_columns
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyWork,
    await_turn,
    pass_turn,
    query_tile_at,
    rows_of,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.tensor_core import Blocks
from fa4flex.kernels.common.transfer import add_bulk, stage_by_fours

PIECE = 32 * FRAGMENT
"""Numbers of dQ that a warp hands on at a time."""


@dataclass(frozen=True)
class Way:
    """Way of a warp's part of a step's dQ: through its own pieces of `staged` (number, warp, stage) into
    `sums`, where it begins with piece `first`."""

    warp: Int32
    staged: cute.Tensor
    sums: cute.Tensor
    first: Int32


class Reduce:
    def __init__(self, config: Config, scheduler: BackwardTileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster
        self.pieces = config.head_dim // config.ctas // FRAGMENT
        """Number of pieces of a step's dQ that a warp hands on."""

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        base: cute.Pointer,
    ) -> None:
        config = self.config
        row = cute.arch.thread_idx()[0] % ROWS
        warp = cute.arch.make_warp_uniform(row // 32)
        whole = in_columns(base, config.memory.dq, self.pieces * FRAGMENT)
        fragments = cute.flat_divide(whole, (ROWS, FRAGMENT))[None, None, 0, None]
        dq = Blocks.load(tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT)), fragments, row)
        part = self.part(warp)
        phase, stage = Int32(0), Int32(0)
        for g in cutlass.range(work.group, unroll=1):
            h = work.kv_head * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            sums = rows_of(arguments.dq_sum, work, h, config.head_dim)
            for i in cutlass.range(queries.count, unroll=1):
                first = (query_tile_at(queries, i) * config.dq_parts + part) * self.pieces
                if const_expr(config.deterministic):
                    counter = await_turn(arguments, work, h, queries, i, config, part)
                cute.arch.mbarrier_wait(self.first_full(pipes), phase)
                phase ^= 1
                way = Way(warp, self.staged(shared), sums, first)
                stage = self.hand_over(dq, pipes, way, stage, phase)
                if const_expr(config.deterministic):
                    self.await_added()
                    pass_turn(counter)
        self.finish()

    def staged(self, shared: Shared) -> cute.Tensor:
        """Shared memory that dQ goes through."""
        return shared.dq

    def await_added(self) -> None:
        """Until what a warp added is in global memory."""
        cute.arch.cp_async_bulk_wait_group(0)

    def finish(self) -> None:
        """Shared memory must last until all was read. What is under way after that, the grid's end waits
        for."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def part(self, warp: Int32) -> Int32:
        """The part of a tile's dQ that a warp has: its pieces follow each other in memory."""
        return warp

    def first_full(self, pipes: Pipes) -> cute.Pointer:
        """Barrier of the first piece of a step's dQ."""
        return pipes.dq_full

    def hand_over(self, dq: Blocks, pipes: Pipes, way: Way, stage: Int32, later: Int32) -> Int32:
        """A warp's part of a step's dQ; returns the next stage. later: phase of the next step's."""
        for piece in range(self.pieces):
            self.await_piece(pipes, piece, later)
            part = cute.make_rmem_tensor((FRAGMENT,), Float32)
            dq.take(piece, part)
            cute.arch.fence_view_async_tmem_load()
            self.tell(pipes, piece)
            stage = self.hand_on(part, way, piece, stage)
        return stage

    def await_piece(self, pipes: Pipes, piece: int, later: Int32) -> None:
        """All pieces are there with the first one."""

    def tell(self, pipes: Pipes, piece: int) -> None:
        """Signal that a piece is read."""
        if piece == self.pieces - 1:
            self.cluster.arrive(pipes.dq_empty)

    def hand_on(self, part: cute.Tensor, way: Way, piece: int, stage: Int32) -> Int32:
        """A piece of it; returns the next stage."""
        target = cute.local_tile(way.sums, (PIECE,), (way.first + piece,))
        staged = way.staged[None, way.warp, stage]
        cute.arch.cp_async_bulk_wait_group(self.config.dq_stages - 1, read=True)
        cute.arch.sync_warp()
        stage_by_fours([part], staged, cute.arch.lane_idx(), 32)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            add_bulk(staged, target.iterator, PIECE)
        cute.arch.cp_async_bulk_commit_group()
        return (stage + 1) % self.config.dq_stages
