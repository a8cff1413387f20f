"""The producer warp: brings keys and values of a tile once, then queries and output gradients with their
rows' statistics."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.bwd_sm90.config import Config
from fa4flex.kernels.bwd_sm90.resources import Shared, keys_of, queries_of
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyGrid,
    KeyWork,
    query_tile_at,
    rows_of,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.transfer import States, Views, announce, load_once, load_stage, partition


class Producer:
    def __init__(self, config: Config, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.scheduler = scheduler

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        transfers: cutlass.Constexpr[tuple[Any, ...]],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        config = self.config
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.do_stages)

        @cute.jit
        def load(work: KeyWork, phase: Int32, states: States) -> States:
            return self.tile(arguments, work, transfers, shared, pipes, (*states, phase))

        self.scheduler.walk(grid, arguments, pipes.next, load, (q_state, do_state), takes=True)

    @cute.jit
    def tile(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        transfers: cutlass.Constexpr[tuple[Any, ...]],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        carry: tuple[Any, Any, Int32],
    ) -> States:
        """Loads what a tile of keys takes. carry: states of the rings, and the phase.

        Of persistent blocks, the first tiles of Q and dO come before K and V, which take the place of the
        last ones when these are done with: until then they are on their way to the L2 cache."""
        config = self.config
        q, k, v, dout = transfers
        q_state, do_state, phase = carry
        keys = self.keys(k, shared.k, work, config.head_dim), self.keys(v, shared.v, work, config.head_dim_v)
        there = Boolean(False)
        if const_expr(config.persistent):
            announce(k, keys[0])
            announce(v, keys[1])
        else:
            self.load_keys((k, v), keys, pipes, phase)
        for g in cutlass.range(work.group, unroll=1):
            h = work.part * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            q_views = self.views(q, shared.q, work, h, config.head_dim)
            do_views = self.views(dout, shared.dout, work, h, config.head_dim_v)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                load_stage(q, pipes.q, q_state, q_views, tile)
                self.rows(rows_of(arguments.lse2, work, h), shared.lse2, pipes.q, q_state, tile)
                q_state.advance()
                load_stage(dout, pipes.dout, do_state, do_views, tile)
                self.rows(rows_of(arguments.delta, work, h), shared.delta, pipes.dout, do_state, tile)
                do_state.advance()
                if const_expr(config.persistent):
                    if not there:
                        self.load_keys((k, v), keys, pipes, phase)
                    there = Boolean(True)
        if const_expr(config.persistent):  # noqa: SIM102
            if not there:
                self.load_keys((k, v), keys, pipes, phase)
        return q_state, do_state

    def load_keys(
        self, transfers: tuple[Any, Any], keys: tuple[Views, Views], pipes: Pipes, phase: Int32
    ) -> None:
        """Loads K and V, once those of the tile before are done with."""
        if self.config.persistent:
            cute.arch.mbarrier_wait(pipes.keys_empty, phase ^ 1)
        for transfer, views, full in zip(transfers, keys, (pipes.k_full, pipes.v_full), strict=True):
            load_once(transfer, views, full)

    def keys(self, transfer: Any, shared: cute.Tensor, work: KeyWork, width: int) -> Views:
        """The block's tile of keys or values."""
        whole = keys_of(self.config, transfer.tma_tensor, work, work.kv_head)
        tiles = cute.local_tile(whole, (self.config.block_keys, width), (None, 0))
        one = cute.make_tensor(shared.iterator, cute.append(shared.layout, cute.make_layout(1)))
        to_shared, from_global = partition(transfer, one, tiles)
        tile = work.tile * self.config.ctas + Cluster(self.config.ctas).rank()
        return to_shared[None, 0], from_global[None, tile]

    def views(self, transfer: Any, shared: cute.Tensor, work: KeyWork, h: Int32, width: int) -> Views:
        whole = queries_of(self.config, transfer.tma_tensor, work, h)
        return partition(transfer, shared, cute.local_tile(whole, (self.config.tile_m, width), (None, 0)))

    def rows(self, statistic: cute.Tensor, shared: cute.Tensor, ring: Any, state: Any, tile: Int32) -> None:
        """A number per row of a tile, on the same barrier."""
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        source = cute.local_tile(statistic, (self.config.tile_m,), (tile,))
        with cute.arch.elect_one():
            cute.copy(atom, source, shared[None, state.index], mbar_ptr=ring.producer_get_barrier(state))
