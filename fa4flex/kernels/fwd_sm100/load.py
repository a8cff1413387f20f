"""The warp that brings queries, keys and values from global into shared memory by TMA."""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.boxes import box_views
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.key_lengths import check_length
from fa4flex.kernels.common.key_loader import Wanted
from fa4flex.kernels.common.key_lookup import KeyLookup, Order
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues, kv_head_of, tokens_of
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.paged_key_values import FEW, PagedKeyValues
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import States, Transfers, Views, partition, sequence
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm100.config import Config
from fa4flex.kernels.fwd_sm100.resources import Products, Shared
from fa4flex.kernels.plan.paging import Boxes

WRITTEN_OUT = {"packed": 1, "used": FEW}
"""Boxes of a tile, at most, whose copies are written out, by lengths: beside the search for a sequence of
packed queries, already four spill."""


class Load:
    def __init__(self, config: Config, scheduler: TileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
    ) -> None:
        k_stages, v_stages = self.config.kv_stages
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, k_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, v_stages)

        @cute.jit
        def load(work: Work, phase: Int32, states: States) -> States:
            k_state, v_state = states
            at = self.scheduler.place(work, grid, arguments)
            keys = self.scheduler.keys(at, work, arguments)
            if const_expr(self.config.paged):
                q = self.query_views(work, transfers, shared, products)
                kv_head = kv_head_of(work, grid, arguments)
                key_values = self.pages(work, kv_head, keys, arguments, transfers, shared, pipes)
            else:
                q, key_values = self.views(work, grid, arguments, transfers, shared, pipes, products)
            tile = tile_at(keys, Int32(0))
            key_values.turn_to(Int32(0))
            self.queries(transfers.q, q, work, pipes, phase, 0)
            key_values.load_keys(k_state, tile)
            k_state.advance()
            for other in cutlass.range_constexpr(1, self.config.q_tiles):
                self.queries(transfers.q, q, work, pipes, phase, other)
            # In the order in which they are multiplied: values of a tile before keys of the next.
            for i in cutlass.range(1, keys.count, unroll=1):
                key_values.load_values(v_state, tile)
                v_state.advance()
                tile = tile_at(keys, i)
                key_values.turn_to(i)
                key_values.load_keys(k_state, tile)
                k_state.advance()
            key_values.load_values(v_state, tile)
            v_state.advance()
            return k_state, v_state

        self.scheduler.walk(grid, arguments, pipes.next, load, (k_state, v_state))

    def views(
        self,
        work: Work,
        grid: Grid,
        arguments: Arguments,
        transfers: Transfers,
        shared: Shared,
        pipes: Pipes,
        products: Products,
    ) -> tuple[Views, KeyValues]:
        """Queries, keys and values of a tile's sequence and head. The order of these lines decides registers:
        at heads of 64 another one spills."""
        rank = self.cluster.rank()
        scores, values = products.scores.get_slice(rank), products.values.get_slice(rank)
        kv_head = kv_head_of(work, grid, arguments)
        q = sequence(transfers.q.tma_tensor, work.q_offset, work.h, work.b)
        k, v = self.tokens(work, kv_head, transfers, arguments)
        q_tiles = scores.partition_A(cute.local_tile(q, products.scores_tile[::2], (None, 0)))
        k_tiles = scores.partition_B(cute.local_tile(k, products.scores_tile[1:], (None, 0)))
        v_tiles = values.partition_B(cute.local_tile(v, products.values_tile[1:], (0, None)))
        q_views = partition(transfers.q, shared.q, q_tiles, modes=3)
        k_views = partition(transfers.k, shared.k, k_tiles, modes=3)
        v_views = partition(transfers.v, shared.v, v_tiles, modes=3)
        return q_views, ContiguousKeyValues(transfers, pipes.k, pipes.v, k_views, v_views)

    def tokens(
        self, work: Work, kv_head: Int32, transfers: Transfers, arguments: Arguments
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Keys and values as `tokens_of` finds them."""
        return tokens_of(work, kv_head, transfers)

    def query_views(self, work: Work, transfers: Transfers, shared: Shared, products: Products) -> Views:
        scores = products.scores.get_slice(self.cluster.rank())
        q = sequence(transfers.q.tma_tensor, work.q_offset, work.h, work.b)
        q_tiles = scores.partition_A(cute.local_tile(q, products.scores_tile[::2], (None, 0)))
        return partition(transfers.q, shared.q, q_tiles, modes=3)

    def pages(
        self,
        work: Work,
        kv_head: Int32,
        keys: KeyTiles,
        arguments: Arguments,
        transfers: Transfers,
        shared: Shared,
        pipes: Pipes,
    ) -> KeyValues:
        config = self.config
        assert shared.tiles is not None
        check_length(arguments, work.b)
        views = box_views(transfers, shared.tiles, arguments, kv_head, Boxes(config.box_rows))
        wanted = Wanted(work.b, kv_head, work.tile, work.kv_len)
        loader, order = arguments.loader.of(arguments, wanted), Order(keys, Int32(0))
        lookup = KeyLookup(loader, work.kv_len, order, config.box_rows, config.tile_n)
        lookup.begin()
        return PagedKeyValues(transfers, pipes.k, pipes.v, *views, lookup, few=WRITTEN_OUT[config.lengths])

    @cute.jit
    def queries(
        self,
        transfer: cutlass.Constexpr[cpasync.TmaInfo],
        views: cutlass.Constexpr[Views],
        work: Work,
        pipes: cutlass.Constexpr[Pipes],
        phase: Int32,
        tile: cutlass.Constexpr[int],
    ) -> None:
        """One tile of queries, as soon as the last scores of those before it are multiplied."""
        to_shared, from_global = views
        size = cute.size_in_bytes(to_shared.element_type, cute.select(to_shared.layout, mode=[0]))
        cute.arch.mbarrier_wait(pipes.q_empty + tile, phase ^ 1)
        self.cluster.expect(pipes.q_full + tile, size)
        cute.copy(
            transfer.atom,
            from_global[None, work.tile * self.config.q_tiles + tile],
            to_shared[None, tile],
            tma_bar_ptr=pipes.q_full + tile,
        )
