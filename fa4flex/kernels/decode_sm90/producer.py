"""The producer warp: brings keys and values from global into shared memory by TMA."""

from __future__ import annotations

import cutlass
from cutlass import cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues, tokens_of
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.paged_key_values import Order, PagedKeyValues, box_views, page_table
from fa4flex.kernels.common.paged_lengths import check_length
from fa4flex.kernels.common.transfer import READ_ONCE, Transfers, partition
from fa4flex.kernels.decode_sm90.config import Config
from fa4flex.kernels.decode_sm90.resources import Pipes, Shared
from fa4flex.kernels.decode_sm90.rows import Tile, tile_of


class Producer:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)
        tile = tile_of(cute.arch.block_idx()[0], arguments, self.hooks, self.config)
        key_values = self.key_values(arguments, tile, transfers, shared, pipes)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            key_tile = tile_at(tile.keys, i)
            key_values.turn_to(i)
            key_values.load_keys(k_state, key_tile)
            k_state.advance()
            key_values.load_values(v_state, key_tile)
            v_state.advance()

    def key_values(
        self, arguments: Arguments, tile: Tile, transfers: Transfers, shared: Shared, pipes: Pipes
    ) -> KeyValues:
        config = self.config
        if config.paged:
            check_length(arguments, tile.b)
            views = box_views(transfers, (shared.k, shared.v), tile.kv_head, config.box_rows)
            table = page_table(arguments, tile.b, tile.kv_len)
            order = Order(tile.keys, tile.first)
            pages = PagedKeyValues(
                transfers, pipes.k, pipes.v, *views, table, order, config.box_rows, config.tile_n
            )
            pages.begin()
            return pages
        k, v = tokens_of(tile.work(tile.kv_head), tile.kv_head, transfers)
        k_tiles = cute.local_tile(k, (config.tile_n, config.head_dim), (None, 0))
        v_tiles = cute.local_tile(v, (config.head_dim_v, config.tile_n), (0, None))
        k_views = partition(transfers.k, shared.k, k_tiles)
        v_views = partition(transfers.v, shared.v, v_tiles)
        # No other block reads them: partial outputs may stay in the cache instead.
        return ContiguousKeyValues(transfers, pipes.k, pipes.v, k_views, v_views, READ_ONCE)
