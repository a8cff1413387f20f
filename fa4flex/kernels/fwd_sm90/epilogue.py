"""From a warpgroup's accumulators to the output and the row statistics in global memory."""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, cute
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.common.fragment import rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.max_logit import largest_of_warp, largest_seen, put_largest
from fa4flex.kernels.common.pointwise import apply_output, quad_channels
from fa4flex.kernels.common.products import ROWS
from fa4flex.kernels.common.row_chunks import chunks_of, put_chunks
from fa4flex.kernels.common.softmax import LN_2, Finished, OnlineSoftmax, logit_of, multiply_rows
from fa4flex.kernels.common.transfer import partition
from fa4flex.kernels.common.work import Work, put_statistic
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.roles import WRITTEN
from fa4flex.kernels.fwd_sm90.rows import rows_of


class Epilogue:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.rows = rows_of(config)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        mine: cutlass.Constexpr[Any],
        tile: cutlass.Constexpr[Any],
        lane: Int32,
    ) -> None:
        """Part of a tile of queries that a warpgroup has; lane: the number of a thread in it."""
        work, group, softmax = mine.work, mine.group, tile.softmax
        row = work.tile * self.config.tile_m + group * ROWS + lane // 32 * 16 + lane % 32 // 4
        finished = softmax.finish(logit_of(self.hooks, arguments, self.rows.place(work, row)[0].h))
        self.statistics(arguments, work, row, lane, finished, softmax)
        out = rows_and_columns(mine.products.out)
        scales = [mine.scale for mine in finished]
        if const_expr(tile.dropout is not None):
            scales = [scale * tile.dropout.stream.remaining for scale in scales]
        multiply_rows(out, scales)
        self.of_codes(arguments, mine, out, finished, lane)
        if const_expr(self.hooks.output is not None):
            width = arguments.out.shape[cute.rank(arguments.out) - 1]
            places = quad_channels(mine.at, mine.query, out, lane, self.rows.offsets)
            apply_output(self.hooks, places, out, width)
        if const_expr(self.config.lengths == "dense" and mine.transfers.out is not None):
            self.store(mine, lane)
        else:
            self.store_rows(arguments.out, work, out, row, lane)

    def of_codes(
        self,
        arguments: Arguments,
        mine: Any,
        out: cute.Tensor,
        finished: list[Finished],
        lane: Int32,
    ) -> None:
        """Outputs (row, column) of codes become those of what the codes stand for."""

    @cute.jit
    def statistics(
        self,
        arguments: Arguments,
        work: Work,
        row: Int32,
        lane: Int32,
        finished: cutlass.Constexpr[list[Finished]],
        softmax: cutlass.Constexpr[OnlineSoftmax],
    ) -> None:
        """Natural logarithms of the denominators, largest scores and entropies; one lane of four writes a
        row's."""
        if const_expr(arguments.max_logit is not None):
            self.largest(arguments, work, row, lane, softmax)
        entropies: list[Float32] = []
        if const_expr(arguments.entropy is not None):
            entropies = softmax.entropies(logit_of(self.hooks, arguments, self.rows.place(work, row)[0].h))
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(softmax.state.rows):
                mine = row + 8 * r
                if mine < self.rows.count(work):
                    head, q = self.rows.place(work, mine)
                    if const_expr(arguments.lse is not None):
                        put_statistic(arguments.lse, head, q, finished[r].lse)
                    if const_expr(arguments.max_scores is not None):
                        largest = softmax.state.largest[r] * softmax.factor
                        put_statistic(arguments.max_scores, head, q, largest * LN_2)
                    if const_expr(arguments.entropy is not None):
                        put_statistic(arguments.entropy, head, q, entropies[r])

    @cute.jit
    def largest(
        self,
        arguments: Arguments,
        work: Work,
        row: Int32,
        lane: Int32,
        softmax: cutlass.Constexpr[OnlineSoftmax],
    ) -> None:
        """Part of the rows in the largest scores of their heads: by one lane of a warp whose rows are of one
        head, else by one of the four that have a row."""
        places = [row + 8 * r for r in range(softmax.state.rows)]
        found = [largest_seen(softmax, r, mine < self.rows.count(work)) for r, mine in enumerate(places)]
        if const_expr(self.config.group == 1):
            largest = largest_of_warp(functools.reduce(cute.arch.fmax, found))
            put_largest(arguments, work.h, largest, lane % 32 == 0)
        else:
            for r in cutlass.range_constexpr(softmax.state.rows):
                largest = softmax.reduce(found[r], cute.arch.fmax)
                put_largest(arguments, self.rows.place(work, places[r])[0].h, largest, lane % 4 == 0)

    @cute.jit
    def store(self, mine: cutlass.Constexpr[Any], lane: Int32) -> None:
        """Registers to shared memory, then one TMA store per warpgroup, which clips what is past the end."""
        transfers, shared, products, work, group = (
            mine.transfers,
            mine.shared,
            mine.products,
            mine.work,
            mine.group,
        )
        if const_expr(not self.config.alias_output):
            self.drain()
        # The last tile's store may still be reading; or, where the queries lie there, another warp's product.
        sync(WRITTEN, group)
        kind = shared.out.element_type
        narrow = cute.make_rmem_tensor_like(products.out, kind)
        narrow.store(products.out.load().to(kind))
        atom = sm90.sm90_get_smem_store_op(LayoutEnum.ROW_MAJOR, kind, Float32)
        copy = cute.make_tiled_copy_C(atom, products.values).get_slice(lane)
        cute.copy(copy, copy.retile(narrow), copy.partition_D(shared.out[None, None, group]))
        cute.arch.fence_proxy("async.shared", space="cta")
        sync(WRITTEN, group)
        if cute.arch.make_warp_uniform(lane // 32) == 0:
            tiles = self.rows.tiles(transfers.out, work, self.config.head_dim_v)
            from_shared, to_global = partition(transfers.out, shared.out, tiles)
            tile = work.tile * self.config.consumers + group
            cute.copy(transfers.out.atom, from_shared[None, group], to_global[None, tile])
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(self.config.alias_output):
                self.drain()
        if const_expr(self.config.alias_output):
            # Queries must not overwrite the output before it has been read.
            sync(WRITTEN, group)

    def drain(self) -> None:
        """Wait until this thread's TMA stores have read shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_rows(self, target: cute.Tensor, work: Work, out: cute.Tensor, row: Int32, lane: Int32) -> None:
        """Registers to global memory: rows end where the sequence does."""
        for r in cutlass.range_constexpr(2):
            chunks = chunks_of(out[r, None], target.element_type, lane)
            mine = row + 8 * r
            if mine < self.rows.count(work):
                head, q = self.rows.place(work, mine)
                if const_expr(cute.rank(target) == 4):
                    put_chunks(target[head.b, q, head.h, None], chunks)
                else:
                    put_chunks(target[head.q_offset + q, head.h, None], chunks)
