"""The correction warpgroup: rescales outputs in tensor memory where a maximum was raised, off the softmax's
way, and finishes them (FlashAttention-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.pointwise import apply_output, one_row, row_channels
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm100.config import CORRECTED, FRAGMENT, ROWS, Config
from fa4flex.kernels.fwd_sm100.mma_ahead import after
from fa4flex.kernels.fwd_sm100.resources import Products, Shared, chunk_columns, first_row
from fa4flex.kernels.fwd_sm100.rows import multiply


@dataclass(frozen=True)
class Output:
    """A query tile's output in tensor memory: to be rescaled in place, and to be read by fragments."""

    taken: Blocks
    put: Blocks
    whole: Blocks


class Turn(NamedTuple):
    """Barriers of a key tile: the place of its scale and the phase in which that comes, the barrier that lets
    the next product begin, and the phase in which the output before it was added to."""

    scale: Int32 | int
    phase: Int32
    early: Int32 | int
    added: Int32


@dataclass(frozen=True)
class Finished:
    """Output of a query tile that nothing is added to any more: a thread's row of it, what that is to be
    multiplied by, arguments of hooks there, and the barrier that lets the next tile's first product begin."""

    output: Output
    tile: int
    row: Int32
    scale: Any
    at: At
    early: Int32 | int


class Correction:
    def __init__(self, config: Config, hooks: Hooks, scheduler: TileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        row = cute.arch.thread_idx()[0] % ROWS
        warp = cute.arch.make_warp_uniform(row // 32)
        outputs = [self.output(products, base, tile, row) for tile in range(self.config.q_tiles)]
        for tile in cutlass.range_constexpr(self.config.q_tiles):
            self.cluster.arrive(pipes.p_early + tile)

        @cute.jit
        def correct(work: Work, phase: Int32, carry: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
            scale_phase, out_count = carry
            at = self.scheduler.place(work, grid, arguments)
            count = self.scheduler.keys(at, work, arguments).count
            self.bring(arguments, work, at, shared)
            for _ in cutlass.range(1, count, unroll=1):
                for tile in cutlass.range_constexpr(self.config.q_tiles):
                    turn = self.turn(tile, scale_phase, phase)
                    cute.arch.mbarrier_wait(pipes.scale_full + 4 * turn.scale + warp, turn.phase)
                    if const_expr(self.config.score_stages > 1):
                        cute.arch.mbarrier_wait(pipes.o_full, turn.added)
                    if const_expr(not self.hooks.elementwise):
                        self.rescale(outputs[tile], shared.scales[row, turn.scale])
                    self.cluster.arrive(pipes.p_early + turn.early)
                scale_phase = self.following(scale_phase)
            for tile in cutlass.range_constexpr(self.config.q_tiles):
                turn = self.turn(tile, scale_phase, phase)
                place = (row, warp, tile)
                scale = self.final(shared, pipes, place, phase)
                cute.arch.mbarrier_wait(pipes.o_full + tile, turn.added)
                finished = Finished(outputs[tile], tile, row, scale, at, turn.early)
                out_count = self.hand_out(arguments, work, shared, pipes, finished, out_count)
            return scale_phase, out_count

        self.scheduler.walk(grid, arguments, pipes.next, correct, (Int32(0), Int32(0)))

    def turn(self, tile: int, count: Int32, of_row: Int32) -> Turn:
        """`count`: of the scales so far, modulo 2, or modulo TURNS where scores have stages; `of_row`: of the
        tiles of queries, modulo 2. Each of these has a key tile more than it has scales."""
        if self.config.score_stages == 1:
            return Turn(tile, count, tile, of_row)
        before = (count + of_row) & 1
        return Turn(count & 1, count >> 1, before ^ 1, before)

    def following(self, count: Int32) -> Int32:
        return count ^ 1 if self.config.score_stages == 1 else after(count)

    def output(self, products: Products, base: cute.Pointer, tile: int, row: Int32) -> Output:
        out = products.outputs_at(base, tile)[(None, None), 0, 0]
        narrow = cute.flat_divide(out, (ROWS, CORRECTED))[None, None, 0, None]
        wide = cute.flat_divide(out, (ROWS, FRAGMENT))[None, None, 0, None]
        few, many = tcgen05.Repetition(CORRECTED), tcgen05.Repetition(FRAGMENT)
        return Output(
            Blocks.load(tcgen05.Ld32x32bOp(few), narrow, row),
            Blocks.store(tcgen05.St32x32bOp(few), narrow, row),
            Blocks.load(tcgen05.Ld32x32bOp(many), wide, row),
        )

    @cute.jit
    def rescale(self, out: cutlass.Constexpr[Output], scale: Float32) -> None:
        """Nearly always, no row of the warp has raised its maximum."""
        if cute.arch.vote_any_sync(scale < 1.0):
            for block in cutlass.range_constexpr(self.config.head_dim_v // CORRECTED):
                part = cute.make_rmem_tensor((CORRECTED,), Float32)
                out.taken.take(block, part)
                cute.arch.fence_view_async_tmem_load()
                multiply(part, scale)
                out.put.put(block, part)
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def final(
        self,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        place: tuple[Int32, Int32, int],
        phase: Int32,
    ) -> Any:
        """Final factor of the output."""
        row, warp, tile = place
        barrier = 4 * tile + warp
        cute.arch.mbarrier_wait(pipes.final_full + barrier, phase)
        scale = self.last_number(shared, row, tile)
        arrive_once(pipes.final_empty + barrier)
        return scale

    def last_number(self, shared: Shared, row: Int32, tile: int) -> Any:
        return Float32(1.0) if self.hooks.elementwise else shared.finals[row, tile]

    @cute.jit
    def hand_out(
        self,
        arguments: Arguments,
        work: Work,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        finished: cutlass.Constexpr[Finished],
        count: Int32,
    ) -> Int32:
        """The finished output leaves tensor memory: for a TMA store by way of shared memory, or straight to
        global memory. Returns how many chunks have been staged so far."""
        out, tile, row = finished.output, finished.tile, finished.row
        blocks = self.config.head_dim_v // FRAGMENT
        per_chunk = chunk_columns(self.config, arguments.out.element_type) // FRAGMENT
        for block in cutlass.range_constexpr(blocks):
            part = cute.make_rmem_tensor((FRAGMENT,), Float32)
            out.whole.take(block, part)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(block == blocks - 1):
                # The next tile's output may be written: its first product waits for this.
                self.cluster.arrive(pipes.p_early + finished.early)
            self.scaled(shared, finished, part, block * FRAGMENT)
            if const_expr(self.hooks.output is not None):
                first = first_row(self.config, work, tile, self.cluster.rank()) + row
                self.apply(arguments, finished.at.but(q=first), part, block * FRAGMENT)
            rounded = cute.make_rmem_tensor((FRAGMENT,), arguments.out.element_type)
            rounded.store(part.load().to(arguments.out.element_type))
            if const_expr(shared.out is None):
                q = first_row(self.config, work, tile, self.cluster.rank()) + row
                self.write(arguments, work, q, rounded, block * FRAGMENT)
            else:
                stage = count % self.config.out_stages
                if const_expr(block % per_chunk == 0):
                    reused = count // self.config.out_stages
                    cute.arch.mbarrier_wait(pipes.out_empty + stage, (reused & 1) ^ 1)
                self.stage(shared.out, out.whole, rounded, (row, block % per_chunk, stage))
                if const_expr(block % per_chunk == per_chunk - 1):
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive_once(pipes.out_full + stage)
                    count = count + 1
        return count

    def bring(self, arguments: Arguments, work: Work, at: At, shared: Shared) -> None:
        """Bring numbers that finished outputs of a tile of queries are going to need."""

    def scaled(self, shared: Shared, finished: Finished, part: cute.Tensor, first: int) -> None:
        """Columns of a row's output from `first` on become those of the weighted mean."""
        if not self.hooks.elementwise:
            multiply(part, finished.scale)

    def apply(self, arguments: Arguments, at: At, part: cute.Tensor, first: int) -> None:
        """The output function of a thread's part of a row."""
        width = arguments.out.shape[cute.rank(arguments.out) - 1]
        places = row_channels(at, at.q, Int32(first), FRAGMENT)
        apply_output(self.hooks, places, one_row(part), width)

    def stage(
        self, target: cute.Tensor, whole: Blocks, rounded: cute.Tensor, place: tuple[Int32, int, Int32]
    ) -> None:
        """A thread's part of a row to its chunk in shared memory."""
        row, block, stage = place
        atom = sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, rounded.element_type, Float32, whole.copy)
        copy = cute.make_tiled_copy_D(atom, whole.copy)
        mine = copy.get_slice(row)
        pieces = cute.flat_divide(target, (ROWS, FRAGMENT))[None, None, 0, None, None]
        shaped = cute.make_tensor(rounded.iterator, cute.make_layout(whole.shape))
        cute.copy(copy, copy.retile(shaped), mine.partition_D(pieces)[None, None, None, block, stage])

    @cute.jit
    def write(
        self, arguments: Arguments, work: Work, q: Int32, rounded: cute.Tensor, first: cutlass.Constexpr[int]
    ) -> None:
        """A thread's part of a row to global memory, 16 bytes at a time; rows end where the sequence does."""
        if q < work.q_len:
            if const_expr(cute.rank(arguments.out) == 4):
                target = arguments.out[work.b, q, work.h, None]
            else:
                target = arguments.out[work.q_offset + q, work.h, None]
            eights = cute.logical_divide(target, cute.make_layout(8))
            for i in cutlass.range_constexpr(FRAGMENT // 8):
                if first + 8 * i < target.shape[0]:
                    eight = cute.make_tensor(rounded.iterator + 8 * i, cute.make_layout(8))
                    cute.autovec_copy(eight, eights[None, first // 8 + i])
