"""Epilogue, from tensor to global memory: copies of a row are merged, to the output or a split's part of it.

Each copy's output is weighted by its share of the whole sum, and the copies are added up in shared memory,
some columns at a time. There a thread has another row than before, and columns next to each other.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, select_
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.combine.workspace import entropies, log_sums, outputs, row_number
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, sync
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.max_logit import largest_seen, put_largest
from fa4flex.kernels.common.packed_rows import Row, Tile, place_of
from fa4flex.kernels.common.pointwise import apply_output, one_row, row_channels
from fa4flex.kernels.common.softmax import Finished, entropy_of, finite, logit_of
from fa4flex.kernels.common.tensor_core import Blocks
from fa4flex.kernels.decode_sm100.config import LANES, MERGED, MERGED_STAGES, Config
from fa4flex.kernels.decode_sm100.resources import Shared
from fa4flex.kernels.decode_sm100.roles import MEET
from fa4flex.kernels.fwd_sm100.rows import multiply

WIDE = 8
"""Columns that a thread adds up and writes at once."""


class Epilogue:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        tile: Tile,
        mine: cutlass.Constexpr[Any],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        output: cute.Tensor,
    ) -> None:
        """Sinks join here where one block has all keys; otherwise where splits are merged."""
        sink = logit_of(self.hooks, arguments, mine.row.h, tile.alone)
        if const_expr(arguments.max_logit is not None):
            largest = largest_seen(mine.softmax, 0, mine.row.exists)
            put_largest(arguments, mine.row.h, largest, mine.row.exists)
        if tile.first < tile.last:
            cute.arch.mbarrier_wait(pipes.o_full, 0)
            scale, lse = self.finished(mine, shared, sink)
            self.put_sum(arguments, tile, mine, lse)
            if const_expr(arguments.entropy is not None):
                self.put_entropy(arguments, tile, mine, self.entropy(shared, sink))
            self.merge(arguments, tile, shared, output, scale)
        else:
            lse = mine.softmax.finish(sink)[0].lse
            if const_expr(self.hooks.elementwise):
                lse = Float32(select_(tile.alone, Float32(0.0), -Float32.inf))
            self.put_sum(arguments, tile, mine, lse)
            if const_expr(arguments.entropy is not None):
                self.put_entropy(arguments, tile, mine, mine.softmax.entropies(sink)[0])
            # Of a split without keys, nobody reads the output.
            if tile.alone:
                self.put_zeros(arguments, tile)

    def finished(self, mine: Any, shared: Shared, sink: Float32 | None) -> Finished:
        """The same of a softmax, or of elementwise weights, whose copies are added as they are: the warps
        meet in either case, as their graph has it."""
        if mine.softmax.online:
            return self.weigh(mine, shared, sink)
        meet()
        (found,) = mine.softmax.finish(sink)
        return found

    def weigh(self, mine: Any, shared: Shared, sink: Float32 | None) -> Finished:
        """Factor of the thread's copy of its row, and the logarithm of the row's sum."""
        thread, rows = cute.arch.thread_idx()[0], self.config.rows
        statistics, state = shared.statistics, mine.softmax.state
        mine_shift = state.shift_to_merge()
        statistics[thread, 0] = mine_shift
        statistics[thread, 1] = state.total[0]
        if state.moment is not None:
            statistics[thread, 2] = state.moment[0]
        meet()
        copies = [
            (statistics[thread % rows + copy * rows, 0], statistics[thread % rows + copy * rows, 1])
            for copy in range(self.config.copies)
        ]
        largest = copies[0][0]
        for shift, _ in copies[1:]:
            largest = cute.arch.fmax(largest, shift)
        common, total = finite(largest), Float32(0.0)
        for shift, part in copies:
            total = total + part * cute.math.exp2(shift - common, fastmath=True)
        scale, lse = mine.softmax.finished(largest, common, total, sink)
        return Finished(scale * cute.math.exp2(mine_shift - common, fastmath=True), lse)

    def entropy(self, shared: Shared, sink: Float32 | None) -> Float32:
        """The entropy of a thread's row, of what its copies have shared before."""
        rows = self.config.rows
        row = cute.arch.thread_idx()[0] % rows
        copies = [
            [shared.statistics[row + copy * rows, i] for i in range(3)] for copy in range(self.config.copies)
        ]
        largest = functools.reduce(cute.arch.fmax, [shift for shift, *_ in copies])
        common, total, moment = finite(largest), Float32(0.0), Float32(0.0)
        for shift, part, own in copies:
            by = common - finite(shift)
            weight = cute.math.exp2(shift - common, fastmath=True)
            total = total + part * weight
            moment = moment + (own - part * by) * weight
        return entropy_of(largest == -Float32.inf, common, (total, moment), sink)

    @cute.jit
    def merge(
        self,
        arguments: Arguments,
        tile: Tile,
        shared: cutlass.Constexpr[Shared],
        output: cute.Tensor,
        scale: Float32 | None,
    ) -> None:
        """Lanes of tensor memory to shared memory, MERGED columns at a time, and sums of the copies from
        there."""
        thread = cute.arch.thread_idx()[0]
        blocks = cute.flat_divide(output, (LANES, MERGED))[None, None, 0, None]
        whole = Blocks.load(tcgen05.Ld32x32bOp(tcgen05.Repetition(MERGED)), blocks, thread)
        for block in cutlass.range_constexpr(self.config.head_dim_v // MERGED):
            held = cute.make_rmem_tensor((MERGED,), Float32)
            whole.take(block, held)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(scale is not None):
                multiply(held, scale)
            buffer = shared.merged[None, None, block % MERGED_STAGES]
            cute.autovec_copy(held, buffer[None, thread])
            meet()
            self.add_copies(arguments, tile, buffer, block * MERGED)

    @cute.jit
    def add_copies(
        self, arguments: Arguments, tile: Tile, buffer: cute.Tensor, first: cutlass.Constexpr[int]
    ) -> None:
        """All threads have columns of a row: a quarter of MERGED of 32 rows, or half of them of 64."""
        rows, thread = self.config.rows, cute.arch.thread_idx()[0]
        threads = LANES // rows
        row, columns = tile.row(thread // threads), MERGED // threads
        if row.exists:
            for i in cutlass.range_constexpr(columns // WIDE):
                column = thread % threads * columns + i * WIDE
                total = cute.make_rmem_tensor((WIDE,), Float32)
                total.fill(0.0)
                for copy in cutlass.range_constexpr(self.config.copies):
                    part = cute.make_rmem_tensor((WIDE,), Float32)
                    whole = cute.logical_divide(
                        buffer[None, thread // threads + copy * rows], cute.make_layout(WIDE)
                    )
                    cute.autovec_copy(whole[None, column // WIDE], part)
                    total.store(total.load() + part.load())
                self.put(arguments, tile, row, total, first + column)

    @cute.jit
    def put(self, arguments: Arguments, tile: Tile, row: Row, total: cute.Tensor, column: Int32) -> None:
        if tile.alone:
            self.finish(arguments, tile, row, total, column)
        else:
            self.put_part(arguments, tile, row, total, column)

    def put_part(self, arguments: Arguments, tile: Tile, row: Row, total: cute.Tensor, column: Int32) -> None:
        number = row_number(arguments, tile.b, row.h, row.q)
        self.store(outputs(arguments)[tile.split, number, None], total, column)

    @cute.jit
    def put_zeros(self, arguments: Arguments, tile: Tile) -> None:
        """Output of rows without keys."""
        threads = LANES // self.config.rows
        thread = cute.arch.thread_idx()[0]
        row = tile.row(thread // threads)
        if row.exists:
            zeros = cute.make_rmem_tensor((WIDE,), Float32)
            zeros.fill(0.0)
            for column in cutlass.range(
                thread % threads * WIDE, self.config.head_dim_v, threads * WIDE, unroll=1
            ):
                self.finish(arguments, tile, row, zeros, column)

    @cute.jit
    def finish(self, arguments: Arguments, tile: Tile, row: Row, total: cute.Tensor, column: Int32) -> None:
        """Columns of a row of the output, by the output function, if there is one."""
        value = total
        if const_expr(self.hooks.output is not None):
            value = cute.make_rmem_tensor((WIDE,), Float32)
            value.store(total.load())
            at = place_of(row, tile, arguments, self.hooks)
            places = row_channels(at, row.q, column, WIDE)
            apply_output(self.hooks, places, one_row(value), arguments.out.shape[3])
        self.store(self.target(arguments, tile, row), value, column)

    def target(self, arguments: Arguments, tile: Tile, row: Row) -> cute.Tensor:
        """A row of the output."""
        return arguments.out[tile.b, row.q, row.h, None]

    @cute.jit
    def store(self, target: cute.Tensor, total: cute.Tensor, column: Int32) -> None:
        """Columns of a row, which may be narrower than tiles."""
        if column < cute.size(target):
            kind = target.element_type
            eight = cute.make_rmem_tensor((WIDE,), kind)
            eight.store(total.load().to(kind))
            eights = cute.logical_divide(target, cute.make_layout(WIDE))
            cute.autovec_copy(eight, eights[None, column // WIDE])

    @cute.jit
    def put_sum(self, arguments: Arguments, tile: Tile, mine: cutlass.Constexpr[Any], lse: Float32) -> None:
        """The logarithm of a row's sum, by its first copy."""
        row = mine.row
        if row.exists & (mine.part == 0):
            if tile.alone:
                if const_expr(arguments.lse is not None):
                    self.put_lse(arguments, tile, row, lse)
            else:
                self.put_part_lse(arguments, tile, row, lse)

    def put_part_lse(self, arguments: Arguments, tile: Tile, row: Row, lse: Float32) -> None:
        log_sums(arguments)[tile.split, row_number(arguments, tile.b, row.h, row.q)] = lse

    def put_lse(self, arguments: Arguments, tile: Tile, row: Row, lse: Float32) -> None:
        arguments.lse[tile.b, row.h, row.q] = lse

    @cute.jit
    def put_entropy(
        self, arguments: Arguments, tile: Tile, mine: cutlass.Constexpr[Any], entropy: Float32
    ) -> None:
        """The entropy of a row or of a split's part of it, by its first copy."""
        row = mine.row
        if row.exists & (mine.part == 0):
            if tile.alone:
                arguments.entropy[tile.b, row.h, row.q] = entropy
            else:
                number = row_number(arguments, tile.b, row.h, row.q)
                entropies(arguments)[tile.split, number] = entropy


def meet() -> None:
    """The four warps' barrier."""
    sync(MEET)
