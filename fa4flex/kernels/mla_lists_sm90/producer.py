"""The producer: four warps find the latent rows of a list, and gather them into pieces of blocks.

An entry is asked for two blocks before its row is copied, and looked at one block before, when its page is
asked for. Each lane keeps the addresses of what it copies of four rows, the same ones for all pieces of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.gathered_key_values import CHUNK, Rows, copy_chunk
from fa4flex.kernels.common.key_lookup import LANES
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.lists import producer as base
from fa4flex.kernels.lists.entries import Entries
from fa4flex.kernels.lists.producer import Listed, ask, asked, key_of, pages_of, place
from fa4flex.kernels.lists.tiles import ListTile, Walk
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE
from fa4flex.kernels.mla_decode_sm90.producer import stage
from fa4flex.kernels.mla_lists_sm90.config import Config
from fa4flex.kernels.mla_lists_sm90.resources import Shared


@dataclass(frozen=True)
class Target:
    """Pieces that a warp's lanes copy rows to. rows: of latent rows; first: number of the warp's first row in
    a block."""

    rows: Rows
    first: Int32
    pipes: Pipes


class Producer(base.Producer):
    config: Config  # type: ignore[assignment]

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        tile: ListTile,
        walk: Walk,
        entries: cutlass.Constexpr[Entries],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        config = self.config
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first = warp * config.height
        row = first + lane % config.height
        loader = self.loader(arguments, tile)
        blocks = [
            Listed(entries, shared, walk, loader, row + n * BLOCK, config.tile_n, config.beside)
            for n in range(BLOCKS)
        ]
        target = Target(self.latent_rows(arguments, shared), first, pipes)
        key = key_of(blocks[0], asked(blocks[0], tile.first))
        pending = asked(blocks[1], tile.first)
        entry, slot = ask(blocks[0], key)
        page, slot = place(blocks[0], entry, slot)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            phase = 1 - (i - tile.first) % 2
            for n in cutlass.range_constexpr(BLOCKS):
                later = key_of(blocks[1 - n], pending)
                entry, offset = ask(blocks[1 - n], later)
                pending = asked(blocks[n], i + 1)
                self.tell_block(shared, pipes, (n, phase), key, row)
                self.gather(target, (page, slot, loader.pages), n, phase)
                page, slot = place(blocks[1 - n], entry, offset)
                key = later

    def latent_rows(self, arguments: Arguments, shared: Shared) -> Rows:
        rows = pages_of(arguments.k)[None, None, 0, None]
        return Rows(rows, shared.pieces.iterator.toint(), self.config.head_dim * 2, PIECE * 2)

    @cute.jit
    def tell_block(
        self,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        at: cutlass.Constexpr[tuple[int, Int32]],
        key: Int32,
        row: Int32,
    ) -> None:
        """Tell which keys the warp's rows of a block are. at: the block's number and phase."""
        number, phase = at
        cute.arch.mbarrier_wait(pipes.ids_empty + number, phase)
        if cute.arch.lane_idx() < self.config.height:
            shared.ids[row + number * BLOCK, 0, 0] = key
        arrive_once(pipes.ids_full + number)

    def gather(self, target: Target, found: tuple[Int32, Int32, Int32], number: int, phase: Int32) -> None:
        """Start to copy the warp's rows of a block, piece by piece. found: page and slot of a lane's row, and
        the number of pages."""
        config, rows, lane = self.config, target.rows, cute.arch.lane_idx()
        own, ring = rows.at(*found), target.pipes.k
        chunks = []
        for start, offset in rows.places(config.height, target.first):
            address = cute.arch.shuffle_sync(own, (start + lane // rows.lanes) % LANES)
            size = select_(address != 0, Int32(CHUNK), Int32(0))
            chunks.append((offset, address + Int64(lane % rows.lanes * CHUNK), size))
        for piece in range(config.pieces):
            state = stage(config, number, piece, phase)
            ring.producer_acquire(state)
            to = rows.address + (number * config.pieces + piece) * (BLOCK * rows.span)
            for offset, address, size in chunks:
                copy_chunk(to + offset, address + piece * rows.span, size)
            ring.producer_commit(state)
