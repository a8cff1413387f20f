"""The producer: brings keys and values from global into shared memory, as bytes."""

from __future__ import annotations

from cutlass import cute

from fa4flex.kernels.common import split_producer
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.boxes import page_views
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.common.paged_key_values import PagedKeyValues
from fa4flex.kernels.common.split_producer import Stages
from fa4flex.kernels.common.transfer import READ_ONCE, Transfers, partition, sequence
from fa4flex.kernels.decode_fp8_sm90.config import span


class Producer(split_producer.Producer):
    """Producer of 16-bit tiles, but values lie like keys: nothing reads them transposed."""

    def span(self, width: int) -> int:
        return span(width)

    def key_values(self, arguments: Arguments, tile: Tile, transfers: Transfers, stages: Stages) -> KeyValues:
        config, rings = self.config, (stages.k_ring, stages.v_ring)
        if config.gathers:
            return self.gathered(arguments, tile, stages)
        each = (transfers.k, stages.k, config.head_dim), (transfers.v, stages.v, config.head_dim_v)
        if config.paged:
            k_views, v_views = (
                page_views(transfer, to, tile.kv_head, (config.box_rows, span(width)))
                for transfer, to, width in each
            )
            return PagedKeyValues(transfers, *rings, k_views, v_views, self.lookup(arguments, tile))
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
        return ContiguousKeyValues(transfers, *rings, k_views, v_views, READ_ONCE)
