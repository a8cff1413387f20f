"""The warp that copies tiles of latent rows, each of which is key and value, as far ahead as stages are
free."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common import split_producer
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.boxes import block_transfer, page_views
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, Tile, tile_of
from fa4flex.kernels.common.paged_key_values import PagedKeyValues
from fa4flex.kernels.common.transfer import READ_ONCE, Ring, Transfers, partition, reordered, sequence
from fa4flex.kernels.mla_decode_sm100.config import BLOCK, PIECE, Config


def transfer_of(arguments: Arguments, layout: Any, config: Config) -> cpasync.TmaInfo:
    """TMA descriptor of tiles of rows, or of their boxes in pages. layout: of tiles in shared memory."""
    one = cute.slice_(layout, (None, None, 0))
    load, keys = cpasync.CopyBulkTensorTileG2SOp(), reordered(arguments.k, [1, 3, 2, 0])
    if config.paged:
        box = cute.make_layout((config.box_rows, PIECE), stride=(PIECE, 1))
        return block_transfer(load, keys, one.inner, box)
    return cpasync.make_tiled_tma_atom(load, keys, one, (BLOCK, config.head_dim))


class Producer(split_producer.Producer):
    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        transfer: cutlass.Constexpr[cpasync.TmaInfo],
        keys: cutlass.Constexpr[cute.Tensor],
        ring: cutlass.Constexpr[Ring],
    ) -> None:
        """keys: (64, width, stage)."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)
        tile = tile_of(part, arguments, self.hooks, self.config)
        rows = self.rows(arguments, tile, transfer, keys, ring)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            rows.turn_to(i)
            rows.load_keys(state, tile_at(tile.keys, i))
            state.advance()

    def rows(
        self, arguments: Arguments, tile: Tile, transfer: cpasync.TmaInfo, keys: cute.Tensor, ring: Ring
    ) -> KeyValues:
        """What copies rows as keys, and has no values beside them."""
        config, transfers = self.config, Transfers(None, transfer, None, None)
        if config.paged:
            views = page_views(transfer, keys, Int32(0), (config.box_rows, PIECE))
            lookup = self.lookup(arguments, tile)
            return PagedKeyValues(transfers, ring, ring, views, views, lookup, alone=True)
        whole = sequence(transfer.tma_tensor, Int32(0), Int32(0), tile.b)
        views = partition(transfer, keys, cute.local_tile(whole, (BLOCK, config.head_dim), (None, 0)))
        return ContiguousKeyValues(transfers, ring, ring, views, views, READ_ONCE)
