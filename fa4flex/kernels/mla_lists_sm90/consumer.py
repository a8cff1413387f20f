"""The two warpgroups that multiply: those of the kernel for latent rows, over keys each of which has an index
of its own."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.decode_sm90.consumer import Mine
from fa4flex.kernels.lists.fragment import Found, keys_of
from fa4flex.kernels.lists.tiles import ListTile, Walk
from fa4flex.kernels.lists_sm90.consumer import listed_row
from fa4flex.kernels.mla_decode_sm90 import consumer as base
from fa4flex.kernels.mla_decode_sm90.config import BLOCK
from fa4flex.kernels.mla_decode_sm90.consumer import Mmas, Whole
from fa4flex.kernels.mla_decode_sm90.producer import stage
from fa4flex.kernels.mla_lists_sm90.config import Config
from fa4flex.kernels.mla_lists_sm90.epilogue import Epilogue
from fa4flex.kernels.mla_lists_sm90.resources import Shared


class Consumer(base.Consumer):
    config: Config

    def __init__(self, config: Config, hooks: Any, unit: int) -> None:
        super().__init__(config, hooks, unit)
        self.epilogue = Epilogue(config, hooks, unit)

    @cute.jit
    def bring_queries(self, arguments: Arguments, tile: ListTile, shared: cutlass.Constexpr[Shared]) -> None:
        """The tile's rows to shared memory, by the first warpgroup. Threads meet after it, as they do when
        entries are known."""
        if const_expr(self.unit == 0):
            queries = arguments.q
            if const_expr(cute.rank(arguments.q) == 4):
                queries = arguments.q[tile.b, None, None, None]
            lane = cute.arch.thread_idx()[0] % 128
            copy_rows(queries, tile.q_offset, tile, shared.q, lane)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        tile: ListTile,
        walk: Walk,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: cutlass.Constexpr[Mmas],
    ) -> None:
        """All tiles of keys, and the results."""
        whole = self.begun(arguments, tile, (shared, pipes.k), mma, cute.arch.thread_idx()[0] % 128)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            phase = (i - tile.first) % 2
            cute.arch.mbarrier_wait(pipes.ids_full + self.unit, phase)
            found = self.found(whole, i >= walk.listed if self.config.beside else None)
            scores, grids = self.scores_of_block(whole, found, phase, True)
            arrive_once(pipes.ids_empty + self.unit)
            self.weigh(whole, scores, grids, phase)
        self.end(arguments, whole)

    def row(self, arguments: Arguments, tile: Any, number: Int32, lane: Int32) -> Mine:
        mine = super().row(arguments, tile, number, lane)
        return listed_row(mine, arguments, tile, self.config, self.hooks)

    def wait(self, whole: Whole, block: int, phase: Int32) -> None:
        """Wait for all pieces of a block, with one fence: rows are written by the generic proxy."""
        for piece in range(self.config.pieces):
            state = stage(self.config, block, piece, phase)
            whole.ring.sync_object_full.wait(state.index, state.phase)
        cute.arch.fence_proxy("async.shared", space="cta")

    def where(self, whole: Whole, kv_first: Found) -> Found:
        """Keys are read again: registers have no room for them beside a product."""
        return self.found(whole, kv_first.beside)

    def found(self, whole: Whole, beside: Boolean | None) -> Found:
        """Keys of this thread's columns of its block."""
        fragment, ids = whole.rows[0].fragment, whole.shared.ids[None, 0, 0]  # type: ignore[attr-defined]
        keys = keys_of(ids, self.unit * BLOCK + fragment.first_column, fragment.columns)
        return Found(keys, beside)
