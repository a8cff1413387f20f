"""The producer warp: brings the keys of a tile once, then queries with their log-sum-exps."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline

from fa4flex.kernels.common.backward import BackwardTileScheduler, KeyGrid, KeyWork, query_tile_at, rows_of
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.transfer import Views, head_of, load_numbers, load_once, load_stage, partition
from fa4flex.kernels.mass_sm90.arguments import MassArguments
from fa4flex.kernels.mass_sm90.config import Config
from fa4flex.kernels.mass_sm90.resources import Shared, Transfers


class Producer:
    def __init__(self, config: Config, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.scheduler = scheduler

    @cute.jit
    def run(
        self,
        arguments: MassArguments,
        grid: KeyGrid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.q_stages)

        @cute.jit
        def load(work: KeyWork, phase: Int32, state: pipeline.PipelineState) -> pipeline.PipelineState:
            return self.tile(arguments, work, transfers, shared, pipes, state)

        self.scheduler.walk(grid, arguments, None, load, state)

    @cute.jit
    def tile(
        self,
        arguments: MassArguments,
        work: KeyWork,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        state: pipeline.PipelineState,
    ) -> pipeline.PipelineState:
        """Loads what a tile of keys takes."""
        q, k, h = transfers.q, transfers.k, work.part
        load_once(k, self.keys(k, shared.k, work), pipes.k_full)
        queries = self.scheduler.queries(work, h, arguments)
        views = self.queries(q, shared.q, work, h)
        for i in cutlass.range(queries.count, unroll=1):
            tile = query_tile_at(queries, i)
            load_stage(q, pipes.q, state, views, tile)
            load_numbers(rows_of(arguments.lse2, work, h), shared.lse2, pipes.q, state, tile)
            state.advance()
        return state

    def keys(self, transfer: Any, shared: cute.Tensor, work: KeyWork) -> Views:
        """The block's tile of keys."""
        config = self.config
        whole = head_of(transfer.tma_tensor, config.ragged, work.keys(work.kv_head))
        tiles = cute.local_tile(whole, (config.tile_n, config.head_dim), (None, 0))
        one = cute.make_tensor(shared.iterator, cute.append(shared.layout, cute.make_layout(1)))
        to_shared, from_global = partition(transfer, one, tiles)
        return to_shared[None, 0], from_global[None, work.tile]

    def queries(self, transfer: Any, shared: cute.Tensor, work: KeyWork, h: Int32) -> Views:
        config = self.config
        whole = head_of(transfer.tma_tensor, config.ragged, work.queries(h))
        return partition(
            transfer, shared, cute.local_tile(whole, (config.tile_m, config.head_dim), (None, 0))
        )
