"""The producer warp: brings keys and values of a tile once, then queries and output gradients with their
rows' statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, const_expr, cute, pipeline
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
from fa4flex.kernels.common.transfer import (
    States,
    Views,
    announce,
    load_numbers,
    load_once,
    load_stage,
    partition,
)


class Transfers(NamedTuple):
    """Descriptors of q, k, v and dout, (S, D, H, B) or packed (T, D, H); of the keys of a pair's other CTA;
    of captured gradients (queries, keys, other axes) that take tiles of dS; and of dK and dV, and of dQ,
    where these are stored so. None, or empty, where there is none."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    dout: cpasync.TmaInfo
    peer_keys: cpasync.TmaInfo | None
    copies: tuple[cpasync.TmaInfo, ...]
    stores: tuple[cpasync.TmaInfo, ...]
    dq: cpasync.TmaInfo | None


@dataclass(frozen=True)
class Block:
    """Tensors that the producer loads from and to, the same for all tiles of keys of a block."""

    transfers: Transfers
    shared: Shared
    pipes: Pipes


class Once(NamedTuple):
    """The block's tile of keys or values: its descriptor, its views, and the barrier that counts it."""

    transfer: cpasync.TmaInfo
    views: Views
    full: cute.Pointer


class Producer:
    def __init__(self, config: Config, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.scheduler = scheduler

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        config, block = self.config, Block(transfers, shared, pipes)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.do_stages)

        @cute.jit
        def load(work: KeyWork, phase: Int32, states: States) -> States:
            return self.tile(arguments, work, block, phase, states)

        self.scheduler.walk(grid, arguments, pipes.next, load, (q_state, do_state), takes=True)

    @cute.jit
    def tile(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        block: cutlass.Constexpr[Block],
        phase: Int32,
        states: States,
    ) -> States:
        """Loads what a tile of keys takes.

        Of persistent blocks, the first tiles of Q and dO come before K and V, which take the place of the
        last ones when these are done with: until then they are on their way to the L2 cache."""
        config, pipes, shared = self.config, block.pipes, block.shared
        q, k, v, dout = block.transfers[:4]
        q_state, do_state = states
        keys = (
            Once(k, self.keys(k, shared.k, work, config.head_dim), pipes.k_full),
            Once(v, self.keys(v, shared.v, work, config.head_dim_v), pipes.v_full),
        )
        there = Boolean(False)
        if const_expr(config.persistent):
            for one in keys:
                announce(one.transfer, one.views)
        else:
            self.load_keys(keys, pipes, phase)
        for g in cutlass.range(work.group, unroll=1):
            h = work.part * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            q_views = self.views(q, shared.q, work, h, config.head_dim)
            do_views = self.views(dout, shared.dout, work, h, config.head_dim_v)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                load_stage(q, pipes.q, q_state, q_views, tile)
                load_numbers(rows_of(arguments.lse2, work, h), shared.lse2, pipes.q, q_state, tile)
                q_state.advance()
                load_stage(dout, pipes.dout, do_state, do_views, tile)
                load_numbers(rows_of(arguments.delta, work, h), shared.delta, pipes.dout, do_state, tile)
                do_state.advance()
                if const_expr(config.persistent):
                    if not there:
                        self.load_keys(keys, pipes, phase)
                    there = Boolean(True)
        if const_expr(config.persistent):  # noqa: SIM102
            if not there:
                self.load_keys(keys, pipes, phase)
        return q_state, do_state

    def load_keys(self, keys: tuple[Once, Once], pipes: Pipes, phase: Int32) -> None:
        """Loads K and V, once those of the tile before are done with."""
        if self.config.persistent:
            cute.arch.mbarrier_wait(pipes.keys_empty, phase ^ 1)
        for one in keys:
            load_once(*one)

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
