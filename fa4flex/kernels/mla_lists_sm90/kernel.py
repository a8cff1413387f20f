"""The Hopper kernel for listed latent rows: launch on the host, and on the device the split into roles.

                                         ,-> consumer 0: S of even blocks, O columns from 0   --> half of out
4 producers --+--[ids 0, 1: of a block]--+    | maxima   ^ maxima, P of odd blocks
              '--[k ring, 2 x 9 pieces]--+    v P of even blocks                                  and of parts
                                         '-> consumer 1: S of odd blocks, O columns from 256  --> half of out
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, mbarriers, pipes_of, sync
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.lists.tiles import ListTile, Part
from fa4flex.kernels.lists_sm90 import kernel as base
from fa4flex.kernels.mla_decode_sm90.consumer import Mmas, tiled_mmas
from fa4flex.kernels.mla_decode_sm90.resources import Layouts, layouts_of
from fa4flex.kernels.mla_lists_sm90.config import Config
from fa4flex.kernels.mla_lists_sm90.consumer import Consumer
from fa4flex.kernels.mla_lists_sm90.producer import Producer
from fa4flex.kernels.mla_lists_sm90.resources import Shared, members_of, shared_of
from fa4flex.kernels.mla_lists_sm90.roles import LISTED, barrier_table


class Forward(base.Forward):
    config: Config  # type: ignore[assignment]

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.pieces)
        self.listed = LISTED
        self.producer = Producer(config)  # type: ignore[arg-type]
        self.consumers = Consumer(config, hooks, 0), Consumer(config, hooks, 1)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        mma = tiled_mmas(arguments.q.element_type, self.config)
        self.launch(self.device(arguments, mma), arguments, stream)

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, readers = mbarriers(self.barriers, storage), self.barriers["k_empty"].arrivals
        return pipes_of(at, k=tile_ring(at["k_full"], shared.pieces, readers, self.config.gather_warps))

    def layouts(self, kind: Any) -> Layouts:
        return layouts_of(self.config, kind)

    def members(self, layouts: Layouts, kind: Any) -> dict[str, Any]:
        return members_of(layouts, kind, self.config)

    def shared(self, storage: Any, layouts: Layouts) -> Shared:
        return shared_of(storage, layouts, self.config)

    @cute.jit
    def consume(
        self,
        arguments: Arguments,
        part: Part,
        tile: ListTile,
        entries: cutlass.Constexpr[Any],
        handed: cutlass.Constexpr[tuple[Shared, Pipes]],
        mma: Mmas,
    ) -> None:
        """Two warpgroups, of which each multiplies in its own order."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 8:
            self.multiply(0, arguments, part, tile, entries, handed, mma)
        else:
            self.multiply(1, arguments, part, tile, entries, handed, mma)

    def multiply(
        self,
        unit: int,
        arguments: Arguments,
        part: Part,
        tile: ListTile,
        entries: Any,
        handed: tuple[Shared, Pipes],
        mma: Mmas,
    ) -> None:
        """A warpgroup that multiplies."""
        shared, pipes = handed
        cute.arch.setmaxregister_increase(self.config.consumer_registers)
        self.consumers[unit].bring_queries(arguments, tile, shared)
        sync(LISTED)
        tile, walk = self.keys(arguments, part, tile, entries, shared)
        self.consumers[unit].run(arguments, tile, walk, shared, pipes, mma)
