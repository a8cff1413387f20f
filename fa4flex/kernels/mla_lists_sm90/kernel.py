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
from cutlass import const_expr, cute, pipeline
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room, sync
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.key_lengths import check_length
from fa4flex.kernels.lists_sm90 import kernel as base
from fa4flex.kernels.lists_sm90.entries import entries_of
from fa4flex.kernels.lists_sm90.tiles import ListTile, Part, part_of, tile_of
from fa4flex.kernels.mla_decode_sm90.consumer import Mmas, tiled_mmas
from fa4flex.kernels.mla_decode_sm90.resources import layouts_of
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
        self.producer = Producer(config)  # type: ignore[arg-type]
        self.consumers = Consumer(config, hooks, 0), Consumer(config, hooks, 1)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        mma = tiled_mmas(arguments.q.element_type, self.config)
        self.launch(self.device(arguments, mma), arguments, stream)

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, readers = mbarriers(self.barriers, storage), self.barriers["k_empty"].arrivals
        return pipes_of(at, k=tile_ring(at["k_full"], shared.pieces, readers, self.config.gather_warps))

    @cute.kernel
    def device(self, arguments: Arguments, mma: Mmas) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kind = arguments.q.element_type
        layouts = layouts_of(self.config, kind)
        members = {"barriers": room(self.barriers), **members_of(layouts, kind, self.config)}
        storage = SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": members})))
        shared = shared_of(storage, layouts, self.config)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config)  # type: ignore[arg-type]
        part = part._replace(splits=cute.arch.make_warp_uniform(part.splits))
        tile = tile_of(part, arguments, self.config)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        if const_expr(self.config.splits):
            # What merges splits may be launched now: it waits for the end of this kernel.
            cute.arch.griddepcontrol_launch_dependents()
        if part.split < part.splits and tile.tokens > 0:
            self.work(arguments, part, tile, (shared, pipes), mma)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        tile: ListTile,
        handed: cutlass.Constexpr[tuple[Shared, Pipes]],
        mma: Mmas,
    ) -> None:
        """A part of the keys of a tile, by three roles."""
        shared, pipes = handed
        entries = entries_of(part, arguments, self.config)  # type: ignore[arg-type]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if const_expr(self.config.paged):
                check_length(arguments, tile.b)
            entries.look(shared, cute.arch.thread_idx()[0])
            sync(LISTED)
            tile, walk = self.keys(arguments, part, tile, entries, shared)
            self.producer.run(arguments, tile, walk, entries, shared, pipes)
        elif warp < 8:
            self.consume(0, arguments, part, tile, entries, handed, mma)
        else:
            self.consume(1, arguments, part, tile, entries, handed, mma)

    def consume(
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
