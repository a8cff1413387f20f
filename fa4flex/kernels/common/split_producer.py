"""The producer: brings keys and values from global into shared memory, one warp by TMA, or several that
gather rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.boxes import KeyLayouts, box_transfers, box_views
from fa4flex.kernels.common.gathered_key_values import gathered
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.key_lengths import check_length
from fa4flex.kernels.common.key_loader import Wanted
from fa4flex.kernels.common.key_lookup import KeyLookup, Order
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues, tokens_of
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, Tile, tile_of
from fa4flex.kernels.common.paged_key_values import PagedKeyValues
from fa4flex.kernels.common.transfer import READ_ONCE, Ring, Transfers, partition, reordered
from fa4flex.kernels.plan.memory import block_bytes
from fa4flex.kernels.plan.paging import Boxes


@dataclass(frozen=True)
class Stages:
    """Rings of tiles of keys (tile_n, head_dim, stage) and of values (head_dim_v, tile_n, stage)."""

    k: cute.Tensor
    v: cute.Tensor
    k_ring: Ring
    v_ring: Ring


def stage_transfers(arguments: Arguments, config: Any, layouts: KeyLayouts) -> tuple[Any, Any]:
    """TMA descriptors of tiles of keys and values, or of their boxes in pages; None where warps gather
    rows."""
    if config.gathers:
        return None, None
    k_layout, v_layout = (cute.slice_(layout, (None, None, 0)) for layout in layouts)
    load = cpasync.CopyBulkTensorTileG2SOp()
    if config.paged:
        return box_transfers(load, arguments, (k_layout, v_layout), Boxes(config.box_rows))
    k, v = reordered(arguments.k, [1, 3, 2, 0]), reordered(arguments.v, [3, 1, 2, 0])
    return (
        cpasync.make_tiled_tma_atom(load, k, k_layout, (config.tile_n, config.head_dim)),
        cpasync.make_tiled_tma_atom(load, v, v_layout, (config.head_dim_v, config.tile_n)),
    )


class Producer:
    """`config` has the widths of tiles, kv_stages, share, and what it says of pages."""

    def __init__(self, config: Any, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    def span(self, width: int) -> int:
        """Bytes of a row in one block of columns of a tile of this width."""
        return block_bytes(width)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        transfers: cutlass.Constexpr[Transfers],
        stages: cutlass.Constexpr[Stages],
    ) -> None:
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)
        tile = tile_of(part, arguments, self.hooks, self.config)
        key_values = self.key_values(arguments, tile, transfers, stages)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            key_tile = tile_at(tile.keys, i)
            key_values.turn_to(i)
            key_values.load_keys(k_state, key_tile)
            k_state.advance()
            key_values.load_values(v_state, key_tile)
            v_state.advance()

    def key_values(self, arguments: Arguments, tile: Tile, transfers: Transfers, stages: Stages) -> KeyValues:
        config, rings = self.config, (stages.k_ring, stages.v_ring)
        if config.gathers:
            return self.gathered(arguments, tile, stages)
        if config.paged:
            boxes = Boxes(config.box_rows)
            views = box_views(transfers, (stages.k, stages.v), arguments, tile.kv_head, boxes)
            return PagedKeyValues(transfers, *rings, *views, self.lookup(arguments, tile), READ_ONCE)
        k, v = tokens_of(tile.work(tile.kv_head), tile.kv_head, transfers)
        k_tiles = cute.local_tile(k, (config.tile_n, config.head_dim), (None, 0))
        v_tiles = cute.local_tile(v, (config.head_dim_v, config.tile_n), (0, None))
        k_views = partition(transfers.k, stages.k, k_tiles)
        v_views = partition(transfers.v, stages.v, v_tiles)
        # No other block reads them: partial outputs may stay in the cache instead.
        return ContiguousKeyValues(transfers, stages.k_ring, stages.v_ring, k_views, v_views, READ_ONCE)

    def gathered(self, arguments: Arguments, tile: Tile, stages: Stages) -> KeyValues:
        """Keys and values whose rows are copied one by one."""
        rings, tiles = (stages.k_ring, stages.v_ring), (stages.k, stages.v)
        k, v = ((width, self.span(width)) for width in (self.config.head_dim, self.config.head_dim_v))
        return gathered(arguments, tile.kv_head, self.lookup(arguments, tile), rings, tiles, (k, v))

    def lookup(self, arguments: Arguments, tile: Tile) -> KeyLookup:
        """The pages of the tile's keys, or of those that this warp gathers."""
        check_length(arguments, tile.b)
        config, warps = self.config, max(self.config.gather_warps, 1)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) if warps > 1 else 0
        wanted = Wanted(tile.b, tile.kv_head, Int32(0), tile.kv_len)
        rows = 1 if config.gathers else config.box_rows
        loader, order = arguments.loader.of(arguments, wanted), Order(tile.keys, tile.first)
        lookup = KeyLookup(loader, tile.kv_len, order, rows, config.tile_n, warps=warps, warp=warp)
        lookup.begin()
        return lookup
