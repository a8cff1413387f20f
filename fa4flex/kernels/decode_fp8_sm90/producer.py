"""The producer warp: brings keys and values from global into shared memory by TMA, as bytes."""

from __future__ import annotations

from cutlass import cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues
from fa4flex.kernels.common.paged_key_values import (
    Order,
    PagedKeyValues,
    check_length,
    page_table,
    page_views,
)
from fa4flex.kernels.common.transfer import READ_ONCE, Transfers, partition, sequence
from fa4flex.kernels.decode_fp8_sm90.config import span
from fa4flex.kernels.decode_fp8_sm90.resources import Shared
from fa4flex.kernels.decode_sm90 import producer as decode
from fa4flex.kernels.decode_sm90.resources import Pipes
from fa4flex.kernels.decode_sm90.rows import Tile


class Producer(decode.Producer):
    """The same as for 16-bit tiles, but values lie like keys: nothing reads them transposed."""

    def key_values(  # type: ignore[override]  # tiles of bytes
        self, arguments: Arguments, tile: Tile, transfers: Transfers, shared: Shared, pipes: Pipes
    ) -> KeyValues:
        config = self.config
        each = (transfers.k, shared.k, config.head_dim), (transfers.v, shared.v, config.head_dim_v)
        if config.paged:
            check_length(arguments, tile.b)
            k_views, v_views = (
                page_views(transfer, to, tile.kv_head, (config.box_rows, span(width)))
                for transfer, to, width in each
            )
            table = page_table(arguments, tile.b, tile.kv_len)
            order = Order(tile.keys, tile.first)
            pages = PagedKeyValues(
                transfers, pipes.k, pipes.v, k_views, v_views, table, order, config.box_rows, config.tile_n
            )
            pages.begin()
            return pages
        work = tile.work(tile.kv_head)
        k_views, v_views = (
            partition(
                transfer,
                to,
                cute.local_tile(
                    sequence(transfer.tma_tensor, work.kv_offset, tile.kv_head, tile.b),
                    (config.tile_n, width),
                    (None, 0),
                ),
            )
            for transfer, to, width in each
        )
        return ContiguousKeyValues(transfers, pipes.k, pipes.v, k_views, v_views, READ_ONCE)
