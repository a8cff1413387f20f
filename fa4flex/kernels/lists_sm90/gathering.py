"""Kernels that gather listed keys, whatever their consumers make of these."""

from __future__ import annotations

from typing import Any

from fa4flex.kernels.common.barriers import Pipes, mbarriers, pipes_of
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.lists_sm90.config import Config
from fa4flex.kernels.lists_sm90.entries import Entries, United
from fa4flex.kernels.lists_sm90.tiles import ListTile, Part, Walk, walk_of, with_run
from fa4flex.kernels.plan.barriers import BarrierTable


class Gathering:
    """A kernel whose producer warps bring the keys that a list names."""

    config: Config
    barriers: BarrierTable

    def keys(
        self, arguments: Any, part: Part, tile: ListTile, entries: Entries | United, shared: Any
    ) -> tuple[ListTile, Walk]:
        """The tile with its part of the keys, once it is known which entries count."""
        walk = walk_of(entries.found(shared), tile, arguments, self.config)
        return with_run(tile, walk, part, self.config), walk

    def pipes(self, storage: Any, shared: Any) -> Pipes:
        at, table = mbarriers(self.barriers, storage), self.barriers
        warps = self.config.gather_warps
        return pipes_of(
            at,
            k=tile_ring(at["k_full"], shared.k, table["k_empty"].arrivals, warps),
            v=tile_ring(at["v_full"], shared.v, table["v_empty"].arrivals, warps),
        )
