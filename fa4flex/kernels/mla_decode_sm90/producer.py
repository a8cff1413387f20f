"""The producer warp: copies blocks of latent rows piece by piece, as far ahead as pieces are free."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part
from fa4flex.kernels.common.transfer import READ_ONCE, partition, reordered, sequence
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE, Config
from fa4flex.kernels.mla_decode_sm90.resources import Shared
from fa4flex.kernels.mla_decode_sm90.rows import tile_of


def transfer_of(arguments: Arguments, layout: Any) -> cpasync.TmaInfo:
    """TMA descriptor of pieces. layout: of pieces in shared memory."""
    one = cute.slice_(layout, (None, None, 0))
    keys = reordered(arguments.k, [1, 3, 2, 0])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), keys, one, (BLOCK, PIECE))


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
        rows = sequence(transfer.tma_tensor, Int32(0), Int32(0), tile.b)
        tiles = cute.local_tile(rows, (BLOCK, PIECE), (None, None))
        to_shared, from_global = partition(transfer, shared.pieces, tiles)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            first = tile_at(tile.keys, i) * BLOCKS
            phase = 1 - (i - tile.first) % 2
            for block in cutlass.range_constexpr(BLOCKS):
                for piece in cutlass.range_constexpr(self.config.pieces):
                    state = stage(self.config, block, piece, phase)
                    ring.producer_acquire(state)
                    cute.copy(
                        transfer.atom,
                        from_global[None, first + block, piece],
                        to_shared[None, block * self.config.pieces + piece],
                        tma_bar_ptr=ring.producer_get_barrier(state),
                        cache_policy=Int64(READ_ONCE),
                    )
