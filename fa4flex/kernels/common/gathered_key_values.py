"""Keys and values in pages of few keys, which warps copy row by row, 16 bytes a lane (cp.async).

TMA would need a copy for each key and block of columns, and starts one in some 19 clocks. Here each warp
brings its own rows of a tile. A row's addresses are computed by the lane that has looked up its page, and
shared by shuffles. Rows of keys that do not exist are filled with zeros; nothing is read for them. A stage is
full when the copies of all lanes have landed. They are writes of the generic proxy: who reads them with the
asynchronous one passes a proxy fence first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import cutlass
from cutlass import Int32, Int64, cute, pipeline, select_

from fa4flex.kernels.common.page_lookup import LANES, PageLookup
from fa4flex.kernels.common.transfer import Ring

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

    def of(self, page: Int32, slot: Int32) -> Int64:
        """Address of a row."""
        return self.cache[page, slot, None].iterator.toint()

    def places(self, tile_n: int, first: Int32) -> Iterator[tuple[int, Int32]]:
        """Copies of a lane: the row of `first` and those after it, LANES / lanes of them at a time, as
        numbers, and where in a tile its 16 bytes of that row's first block are. first: a multiple of 8."""
        lane, together = cute.arch.lane_idx(), LANES // self.lanes
        column = lane % self.lanes * CHUNK
        for start in range(0, tile_n, together):
            offset = (start + lane // self.lanes) * self.span + column
            yield start, first * self.span + swizzled(offset, self.span)


def swizzled(offset: Int32, width: int) -> Int32:
    """Swizzled offset of byte `offset` of a block whose rows have this width."""
    return offset ^ ((offset >> 3) & (width - CHUNK))


@dataclass(frozen=True)
class GatheredKeyValues:
    """KeyValues in pages of any size, each key of which is looked up. `at` [key, 2] has the addresses of a
    lane's rows of the tiles at hand, of keys and of values: 0 where there is none."""

    k_ring: Ring
    v_ring: Ring
    k: Rows
    v: Rows
    lookup: PageLookup
    at: cute.Tensor = field(init=False)

    def __post_init__(self) -> None:
        parts = cute.size(self.lookup.now, mode=[0])
        object.__setattr__(self, "at", cute.make_rmem_tensor((parts, 2), Int64))

    def turn_to(self, number: Int32) -> None:
        """A warp's."""
        self.lookup.turn_to(number)
        _locate(self)

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        self._load(self.k, self.k_ring, state, 0)

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        self._load(self.v, self.v_ring, state, 1)

    def _load(self, rows: Rows, ring: Ring, state: pipeline.PipelineState, which: int) -> None:
        ring.sync_object_empty.wait(state.index, state.phase)
        lookup = self.lookup
        block = lookup.tile_n * rows.span
        stage = rows.address + state.index * (lookup.tile_n * rows.width)
        first = lookup.turn[0] * lookup.height
        lane = cute.arch.lane_idx()
        for start, place in rows.places(lookup.height, lookup.warp * lookup.height):
            row = start + lane // rows.lanes
            address = cute.arch.shuffle_sync(self.at[start // LANES, which], (first + row) % LANES)
            for number in range(rows.width // rows.span):
                column = number * rows.span + lane % rows.lanes * CHUNK
                exists = address != 0
                if rows.given < rows.width:
                    exists = exists & (column < rows.given)
                source, size = address + column, select_(exists, Int32(CHUNK), Int32(0))
                copy_chunk(stage + place + number * block, source, size)
        cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))


def copy_chunk(target: Int32, source: Int64, size: Int32) -> None:
    """Start to copy `size` bytes of global memory, and zeros after them, to 16 bytes of shared memory."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size]
    )


@cute.jit
def _locate(source: cutlass.Constexpr[GatheredKeyValues]) -> None:
    """Addresses of a lane's rows, once for all tiles whose pages are at hand."""
    lookup, at = source.lookup, source.at
    if lookup.turn[0] == 0:
        for part in cutlass.range_constexpr(cute.size(at, mode=[0])):
            page, slot = lookup.now[part, 0], lookup.now[part, 1]
            k, v = Int64(0), Int64(0)
            if page < lookup.table.pages:
                k = source.k.of(page, slot)
                v = source.v.of(page, slot)
            at[part, 0] = k
            at[part, 1] = v
