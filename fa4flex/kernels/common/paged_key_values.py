"""Keys and values in pages of a pool, which TMA brings in boxes.

A tile is brought in boxes of keys that lie next to each other in a page, one TMA copy each. What lies past
the end of a sequence, or in a page that does not exist, is asked for past the end of the pool, where TMA
reads nothing and brings zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.key_lookup import LANES, KeyLookup, Places
from fa4flex.kernels.common.transfer import Ring, Transfers, Views

SEVERAL = 5
"""Boxes of a tile, at least, for which it pays to move what is known of them to the first lanes."""

FEW = 8
"""Boxes of a tile, at most, whose copies are written out one after another, so that none waits for the next
page: of more, for want of registers, half as many in each turn of a loop."""


@dataclass(frozen=True)
class PagedKeyValues:
    """KeyValues in pages. `policy` says what the L2 cache keeps of them; without one, pages that several
    sequences have are brought from it. `alone`: the warp brings only keys, or only values.

    Of `few` boxes the copies are written out, or of half as many where values are behind; of more, half as
    many at a time. For k and v see box_views. Values are those of the tile that was turned to, or where
    `lookup.behind` is 1 of the one before.
    """

    transfers: Transfers
    k_ring: Ring
    v_ring: Ring
    k: Views
    v: Views
    lookup: KeyLookup
    policy: int | None = None
    few: int = FEW
    alone: bool = False

    @property
    def copied(self) -> int:
        """Boxes of a tile that were looked up together."""
        return min(self.lookup.boxes, LANES)

    @property
    def unroll(self) -> int:
        """Boxes that are written out one after the other in a turn of a loop."""
        few = self.few // (1 + self.lookup.behind)
        return self.copied if self.copied <= few else max(self.few // 2, 1)

    def turn_to(self, number: Int32) -> None:
        """A warp's."""
        self.lookup.turn_to(number)

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        _load(self, self.transfers.k, self.k_ring, self.k, state, self._places(0))

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        places = self._places(self.lookup.behind)
        _load(self, self.transfers.v, self.v_ring, self.v, state, places)

    def _places(self, behind: int) -> Places:
        return _in_first_lanes(self, self.lookup.places(behind))


def _in_first_lanes(source: PagedKeyValues, places: Places) -> Places:
    """The same boxes, moved to the lanes from 0 on where that is fewer instructions: a lane with a number
    that is known when compiled is not computed for each box. A warp that brings keys and values computes it
    for both."""
    if not source.alone or source.lookup.tiles == 1 or source.copied < SEVERAL:
        return places
    lane = (places.first + cute.arch.lane_idx()) % LANES
    moved = tuple(
        (cute.arch.shuffle_sync(pages, lane), cute.arch.shuffle_sync(boxes, lane))
        for pages, boxes in places.parts
    )
    return Places(Int32(0), moved)


@cute.jit
def _load(
    source: cutlass.Constexpr[PagedKeyValues],
    transfer: cutlass.Constexpr[cpasync.TmaInfo],
    ring: cutlass.Constexpr[Ring],
    views: cutlass.Constexpr[Views],
    state: pipeline.PipelineState,
    places: Places,
) -> None:
    (to_shared, from_global), first = views, places.first
    barrier = ring.producer_get_barrier(state)
    policy = {} if source.policy is None else {"cache_policy": Int64(source.policy)}
    ring.producer_acquire(state)
    for part in cutlass.range_constexpr(len(places.parts)):
        pages, boxes = places.parts[part]
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
