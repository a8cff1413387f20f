"""The producer warp: copies blocks of latent rows piece by piece, as far ahead as pieces are free."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.boxes import block_transfer, page_views
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.key_lengths import check_length
from fa4flex.kernels.common.key_loader import Wanted
from fa4flex.kernels.common.key_lookup import LANES, KeyLookup, Order
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, Tile, tile_of
from fa4flex.kernels.common.transfer import READ_ONCE, partition, reordered, sequence
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE, Config
from fa4flex.kernels.mla_decode_sm90.resources import Shared


def transfer_of(arguments: Arguments, layout: Any, config: Config) -> cpasync.TmaInfo:
    """TMA descriptor of pieces, or of their boxes in pages. layout: of pieces in shared memory."""
    one = cute.slice_(layout, (None, None, 0))
    load, keys = cpasync.CopyBulkTensorTileG2SOp(), reordered(arguments.k, [1, 3, 2, 0])
    if config.paged:
        box = cute.make_layout((config.box_rows, PIECE), stride=(PIECE, 1))
        return block_transfer(load, keys, one.inner, box)
    return cpasync.make_tiled_tma_atom(load, keys, one, (BLOCK, PIECE))


def stage(config: Config, block: int, piece: int, phase: Int32) -> pipeline.PipelineState:
    """The stage of a piece: the same one in each tile, whose phases alternate."""
    count = BLOCKS * config.pieces
    return pipeline.PipelineState(count, Int32(0), Int32(block * config.pieces + piece), phase)


class Producer:
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        transfer: cpasync.TmaInfo,
        shared: cutlass.Constexpr[Shared],
        ring: cutlass.Constexpr[Any],
    ) -> None:
        tile = tile_of(part, arguments, self.hooks, self.config)
        if const_expr(self.config.paged):
            self.run_pages(arguments, tile, transfer, shared, ring)
        else:
            rows = sequence(transfer.tma_tensor, Int32(0), Int32(0), tile.b)
            tiles = cute.local_tile(rows, (BLOCK, PIECE), (None, None))
            views = partition(transfer, shared.pieces, tiles)
            for i in cutlass.range(tile.first, tile.last, unroll=1):
                first, phase = tile_at(tile.keys, i) * BLOCKS, self.phase(tile, i)
                for block in cutlass.range_constexpr(BLOCKS):
                    for piece in cutlass.range_constexpr(self.config.pieces):
                        state = stage(self.config, block, piece, phase)
                        ring.producer_acquire(state)
                        to_shared, from_global = views
                        cute.copy(
                            transfer.atom,
                            from_global[None, first + block, piece],
                            to_shared[None, block * self.config.pieces + piece],
                            tma_bar_ptr=ring.producer_get_barrier(state),
                            cache_policy=Int64(READ_ONCE),
                        )

    def phase(self, tile: Tile, i: Int32) -> Int32:
        """Phase of the empty barriers of tile i, which follow those of full ones."""
        return 1 - (i - tile.first) % 2

    @cute.jit
    def run_pages(
        self,
        arguments: Arguments,
        tile: Tile,
        transfer: cpasync.TmaInfo,
        shared: cutlass.Constexpr[Shared],
        ring: cutlass.Constexpr[Any],
    ) -> None:
        """Pieces in boxes of keys that lie next to each other in a page."""
        config, boxes = self.config, BLOCK // self.config.box_rows
        to_shared, from_global = page_views(transfer, shared.pieces, Int32(0), (config.box_rows, PIECE))
        check_length(arguments, tile.b)
        wanted = Wanted(tile.b, Int32(0), Int32(0), tile.kv_len)
        loader, order = arguments.loader.of(arguments, wanted), Order(tile.keys, tile.first)
        lookup = KeyLookup(loader, tile.kv_len, order, config.box_rows, config.tile_n)
        lookup.begin()
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            lookup.turn_to(i)
            phase, (first, parts) = self.phase(tile, i), lookup.places()
            pages, numbers = parts[0]
            for block in cutlass.range_constexpr(BLOCKS):
                found = []
                for n in cutlass.range_constexpr(boxes):
                    lane = (first + block * boxes + n) % LANES
                    found.append((cute.arch.shuffle_sync(pages, lane), cute.arch.shuffle_sync(numbers, lane)))
                for piece in cutlass.range_constexpr(config.pieces):
                    state = stage(config, block, piece, phase)
                    ring.producer_acquire(state)
                    for n in cutlass.range_constexpr(boxes):
                        page, number = found[n]
                        cute.copy(
                            transfer.atom,
                            from_global[None, number, piece, page],
                            to_shared[None, n, 0, block * config.pieces + piece],
                            tma_bar_ptr=ring.producer_get_barrier(state),
                        )
