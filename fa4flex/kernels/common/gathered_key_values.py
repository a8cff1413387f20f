"""Keys and values in pages of few keys, which warps copy row by row, 16 bytes a lane (cp.async).

TMA would need a copy for each key and block of columns, and starts one in some 19 clocks. Here each warp
brings its own rows of a tile. A row's address is computed by the lane that has looked up its page, and shared
by shuffles. Rows of keys that do not exist are filled with zeros; nothing is read for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, cute, pipeline, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.gathering_rings import FilledRing
from fa4flex.kernels.common.key_lookup import LANES, KeyLookup, Places

CHUNK = 16
"""Bytes that a lane copies at once."""


@dataclass(frozen=True)
class Rows:
    """Rows of keys, or of values, of one head, and the tiles that they are copied to.

    cache     of the head: [pages, page_size, D]
    address   of the first tile in shared memory
    width     bytes of a row of a tile; the tensor's may have fewer, and zeros follow
    span      bytes of a row in one block of columns: its swizzle pattern
    """

    cache: cute.Tensor
    address: Int32
    width: int
    span: int

    @property
    def lanes(self) -> int:
        """Lanes that copy a row's part of a block."""
        return self.span // CHUNK

    @property
    def given(self) -> int:
        """Bytes of a row of the tensor."""
        return self.cache.shape[2] * self.cache.element_type.width // 8

    def at(self, page: Int32, slot: Int32, pages: Int32) -> Int64:
        """Address of a row; 0 past the last page."""
        address = self.cache[page, slot, None].iterator.toint()
        return select_(page < pages, address, Int64(0))

    def places(self, count: int, first: Int32 | int) -> Iterator[tuple[int, Int32]]:
        """Numbers of rows, of which LANES / lanes are copied at once, and where in a tile a lane's 16 bytes
        of their first block are. count, first: of the rows, multiples of 8."""
        lane, together = cute.arch.lane_idx(), LANES // self.lanes
        column = lane % self.lanes * CHUNK
        for start in range(0, count, together):
            offset = (start + lane // self.lanes) * self.span + column
            yield start, first * self.span + swizzled(offset, self.span)


def swizzled(offset: Int32, width: int) -> Int32:
    """Swizzled offset of byte `offset` of a block whose rows have this width."""
    return offset ^ ((offset >> 3) & (width - CHUNK))


@dataclass(frozen=True)
class GatheredKeyValues:
    """KeyValues in pages of any size, each key of which is looked up. Values are those of the tile that was
    turned to, or where `lookup.behind` is 1 of the one before."""

    k_ring: FilledRing
    v_ring: FilledRing
    k: Rows
    v: Rows
    lookup: KeyLookup

    def turn_to(self, number: Int32) -> None:
        """A warp's."""
        self.lookup.turn_to(number)

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        self._load(self.k, self.k_ring, state, self.lookup.places(0))

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        self._load(self.v, self.v_ring, state, self.lookup.places(self.lookup.behind))

    def _load(self, rows: Rows, ring: FilledRing, state: pipeline.PipelineState, places: Places) -> None:
        lookup, lane = self.lookup, cute.arch.lane_idx()
        own = [rows.at(page, slot, lookup.loader.pages) for page, slot in places.parts]
        ring.producer_acquire(state)
        block = lookup.tile_n * rows.span
        stage = rows.address + state.index * (lookup.tile_n * rows.width)
        for start, place in rows.places(lookup.height, lookup.warp * lookup.height):
            row = start + lane // rows.lanes
            address = cute.arch.shuffle_sync(own[start // LANES], (places.first + row) % LANES)
            for number in range(rows.width // rows.span):
                column = number * rows.span + lane % rows.lanes * CHUNK
                exists = address != 0
                if rows.given < rows.width:
                    exists = exists & (column < rows.given)
                size = select_(exists, Int32(CHUNK), Int32(0))
                copy_chunk(stage + place + number * block, address + column, size)
        ring.producer_commit(state)


def copy_chunk(target: Int32, source: Int64, size: Int32) -> None:
    """Start to copy `size` bytes of global memory, and zeros after them, to 16 bytes of shared memory."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size]
    )


Each = tuple[Any, Any]
"""One of keys, one of values."""


def gathered(
    arguments: Arguments, kv_head: Int32, lookup: KeyLookup, rings: Each, tiles: Each, rows: Each
) -> GatheredKeyValues:
    """Keys and values of a head, gathered from the cache to tiles. rows: width of a tile in elements, and
    bytes of a row in one block of its columns."""
    k, v = (
        Rows(
            cache[None, None, kv_head, None],
            tile.iterator.toint(),
            width * cache.element_type.width // 8,
            span,
        )
        for cache, tile, (width, span) in zip((arguments.k, arguments.v), tiles, rows)
    )
    return GatheredKeyValues(*rings, k, v, lookup)
