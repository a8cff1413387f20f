"""Keys and values in pages of a pool, found by a table.

A tile is brought in boxes of keys that lie next to each other in a page, one TMA copy each. Each lane of the
loading warp looks up the page of one box, for as many tiles as there are lanes for, and does so one such
batch ahead: a look-up takes as long as the copy that waits for it. What lies past the end of a sequence, or
in a page that does not exist, is asked for past the end of the pool, where TMA reads nothing and brings
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute, pipeline, select_
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.faults import report
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.transfer import Ring, Transfers, Views

LANES = 32
SEVERAL = 5
"""Boxes of a tile, at least, for which it pays to move what is known of them to the first lanes."""

FEW = 8
"""Boxes of a tile, at most, whose copies are written out one after another, so that none waits for the next
page: of more, for want of registers, half as many in each turn of a loop."""


class PageTable(NamedTuple):
    """A sequence's row of the table, the pages of the pool, slots of a page, keys of the sequence, and where
    faults are told."""

    row: cute.Tensor
    pages: Int32
    page_size: Int32
    length: Int32
    faults: Int64


def page_table(arguments: Arguments, b: Int32, length: Int32) -> PageTable:
    """The pages of sequence b, which has `length` keys."""
    pages, page_size = arguments.k.shape[:2]
    row = arguments.page_table[b, None]
    return PageTable(row, Int32(pages), Int32(page_size), length, arguments.faults)


class Order(NamedTuple):
    """Tiles of keys, and the number of the first one that is asked for."""

    keys: KeyTiles
    first: Int32


@dataclass(frozen=True)
class PagedKeyValues:
    """KeyValues in pages, whose tiles are asked for in this order. `policy` says what the L2 cache keeps of
    them; without one, pages that several sequences have are brought from it. `alone`: the warp brings only
    keys, or only values.

    `rows` is the height of a box, and of `few` boxes the copies are written out, or of half as many where
    values are behind; of more, half as many at a time. For k and v see box_views. Values are those of the
    tile that was turned to, or where `behind` is 1 of the one before. `now` [box, 2] has a lane's pages, and
    numbers of boxes in these, for the tiles that are copied, `following` for those after them, and `passed`
    for those before, if values are behind; `turn` [1] is the number of the tile among the first.
    """

    transfers: Transfers
    k_ring: Ring
    v_ring: Ring
    k: Views
    v: Views
    table: PageTable
    order: Order
    rows: int
    tile_n: int
    behind: int = 0
    policy: int | None = None
    few: int = FEW
    alone: bool = False
    now: cute.Tensor = field(init=False)
    following: cute.Tensor = field(init=False)
    passed: cute.Tensor | None = field(init=False, default=None)
    turn: cute.Tensor = field(init=False)

    def __post_init__(self) -> None:
        held = max(self.boxes // LANES, 1), 2
        names = ("now", "following", *("passed",) * self.behind, "turn")
        for name in names:
            shape = (1,) if name == "turn" else held
            object.__setattr__(self, name, cute.make_rmem_tensor(shape, Int32))

    @property
    def boxes(self) -> int:
        """Number of boxes of a tile."""
        return self.tile_n // self.rows

    @property
    def copied(self) -> int:
        """Boxes of a tile that were looked up together."""
        return min(self.boxes, LANES)

    @property
    def unroll(self) -> int:
        """Boxes that are written out one after the other in a turn of a loop."""
        return self.copied if self.copied <= self.few // (1 + self.behind) else max(self.few // 2, 1)

    @property
    def tiles(self) -> int:
        """Whose boxes are looked up together."""
        return max(LANES // self.boxes, 1)

    def begin(self) -> None:
        """A warp's: before the first tile."""
        _look_up(self, self.order.first, self.following)

    def turn_to(self, number: Int32) -> None:
        """A warp's."""
        _turn_to(self, number)

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        _load(self, (self.transfers.k, self.k_ring, self.k), state, _found(self, 0))

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        _load(self, (self.transfers.v, self.v_ring, self.v), state, _found(self, self.behind))


class Found(NamedTuple):
    """Boxes of a tile: the first lane that has one, and for each part of the tile what lanes have, pages and
    numbers of boxes in these."""

    first: Int32
    parts: tuple[tuple[Int32, Int32], ...]


def _found(source: PagedKeyValues, behind: int) -> Found:
    """The boxes of the tile that was turned to, or of the one before."""
    now, turn = source.now, source.turn[0]
    parts = range(cute.size(now, mode=[0]))
    if not behind:
        own = tuple((now[part, 0], now[part, 1]) for part in parts)
        return _in_first_lanes(source, Found(turn * source.boxes, own))
    assert source.passed is not None
    passed, wrapped = source.passed, turn == 0
    before = select_(wrapped, Int32(source.tiles - 1), turn - 1)
    both = tuple(
        (select_(wrapped, passed[part, 0], now[part, 0]), select_(wrapped, passed[part, 1], now[part, 1]))
        for part in parts
    )
    return _in_first_lanes(source, Found(before * source.boxes, both))


def _in_first_lanes(source: PagedKeyValues, found: Found) -> Found:
    """The same boxes, moved to the lanes from 0 on where that is fewer instructions: a lane with a number
    that is known when compiled is not computed for each box. A warp that brings keys and values computes it
    for both."""
    if not source.alone or source.tiles == 1 or source.copied < SEVERAL:
        return found
    lane = (found.first + cute.arch.lane_idx()) % LANES
    moved = tuple(
        (cute.arch.shuffle_sync(pages, lane), cute.arch.shuffle_sync(boxes, lane))
        for pages, boxes in found.parts
    )
    return Found(Int32(0), moved)


@cute.jit
def _load(
    source: cutlass.Constexpr[PagedKeyValues],
    what: cutlass.Constexpr[tuple[cpasync.TmaInfo, Ring, Views]],
    state: pipeline.PipelineState,
    found: Found,
) -> None:
    transfer, ring, (to_shared, from_global) = what
    first = found.first
    barrier = ring.producer_get_barrier(state)
    policy = {} if source.policy is None else {"cache_policy": Int64(source.policy)}
    ring.producer_acquire(state)
    for part in cutlass.range_constexpr(len(found.parts)):
        pages, boxes = found.parts[part]
        for i in cutlass.range(source.copied, unroll=source.unroll):
            lane = (first + i) % LANES
            page, box = cute.arch.shuffle_sync(pages, lane), cute.arch.shuffle_sync(boxes, lane)
            for column in cutlass.range_constexpr(cute.size(to_shared, mode=[2])):
                cute.copy(
                    transfer.atom,
                    from_global[None, box, column, page],
                    to_shared[None, part * LANES + i, column, state.index],
                    tma_bar_ptr=barrier,
                    **policy,
                )


@cute.jit
def _turn_to(source: cutlass.Constexpr[PagedKeyValues], number: Int32) -> None:
    turn = (number - source.order.first) % source.tiles
    source.turn[0] = turn
    now, following, passed = source.now, source.following, source.passed
    if turn == 0:
        for i in cutlass.range_constexpr(cute.size(now)):
            if const_expr(passed is not None):
                passed[i] = now[i]
            now[i] = following[i]
        _look_up(source, number + source.tiles, following)


@cute.jit
def _look_up(
    source: cutlass.Constexpr[PagedKeyValues], number: Int32, into: cutlass.Constexpr[cute.Tensor]
) -> None:
    """Find a lane's boxes of the tiles from this one on: pages, and numbers of boxes in these."""
    table, lane = source.table, cute.arch.lane_idx()
    place = number + lane // source.boxes
    keys = source.order.keys
    tile = tile_at(keys, cutlass.min(place, keys.count - 1))
    for i in cutlass.range_constexpr(cute.size(into, mode=[0])):
        key = tile * source.tile_n + (i * LANES + lane) % source.boxes * source.rows
        page, box = table.pages, Int32(0)
        if place < keys.count and key < table.length:
            column = key // table.page_size
            given = Int64(table.row[column])
            if given >= 0 and given < table.pages:
                page = Int32(given)
                box = (key - column * table.page_size) // source.rows
            else:
                report(table.faults, "page missing", (given, Int64(table.pages)))
        into[i, 0] = page
        into[i, 1] = box
