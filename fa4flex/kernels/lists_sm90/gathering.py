"""Hopper kernels that gather listed keys, whatever their consumers make of these."""

from __future__ import annotations

from typing import Any

from fa4flex.kernels.common.barriers import Pipes, mbarriers, pipes_of
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.lists import gathering
from fa4flex.kernels.lists_sm90.config import Config
from fa4flex.kernels.plan.barriers import BarrierTable


class Gathering(gathering.Gathering):
    """A kernel whose consumer warps read what is gathered."""

    config: Config
    barriers: BarrierTable

    def pipes(self, storage: Any, shared: Any) -> Pipes:
        at, table = mbarriers(self.barriers, storage), self.barriers
        warps = self.config.gather_warps
        return pipes_of(
            at,
            k=tile_ring(at["k_full"], shared.k, table["k_empty"].arrivals, warps),
            v=tile_ring(at["v_full"], shared.v, table["v_empty"].arrivals, warps),
        )
