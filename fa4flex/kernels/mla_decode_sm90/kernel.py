"""The Hopper kernel for few queries over latent rows: descriptor and launch on the host, and on the device
the split into roles.

                                      ,--> consumer 0: S of even blocks, O columns from 0    --> half of out
producer warp --[k ring, 2 x 9 pieces]    | maxima   ^ maxima, P of odd blocks
                                      |   v P of even blocks                                      and of parts
                                      '--> consumer 1: S of odd blocks, O columns from 256   --> half of out
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4flex.kernels.combine.split_forward import SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import mbarriers, room
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Part, part_of
from fa4flex.kernels.common.transfer import prefetch_descriptors
from fa4flex.kernels.mla_decode_sm90.config import Config
from fa4flex.kernels.mla_decode_sm90.consumer import Consumer, Mmas, tiled_mmas
from fa4flex.kernels.mla_decode_sm90.producer import Producer, transfer_of
from fa4flex.kernels.mla_decode_sm90.resources import Shared, layouts_of, members_of, shared_of
from fa4flex.kernels.mla_decode_sm90.roles import barrier_table


class Forward(SplitForward):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.pieces, config.clears)
        self.producer = Producer(config, hooks)
        self.consumers = Consumer(config, hooks, 0), Consumer(config, hooks, 1)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        kind = arguments.q.element_type
        transfer = transfer_of(arguments, layouts_of(self.config, kind).pieces, self.config)
        mma = tiled_mmas(kind, self.config)
        self.launch(self.device(arguments, transfer, mma), arguments, stream)

    @cute.kernel
    def device(self, arguments: Arguments, transfer: cpasync.TmaInfo, mma: Mmas) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            prefetch_descriptors(transfer)
        kind = arguments.q.element_type
        layouts = layouts_of(self.config, kind)
        members = {"barriers": room(self.barriers), **members_of(layouts, kind)}
        storage = SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": members})))
        shared = shared_of(storage, layouts)
        at = mbarriers(self.barriers, storage)
        ring = tile_ring(at["k_full"], shared.pieces, self.barriers["k_empty"].arrivals)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config.slice_rows)
        part = part._replace(splits=cute.arch.make_warp_uniform(part.splits))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        # What merges splits may be launched now: it waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if part.split < part.splits:
            self.work(arguments, part, transfer, shared, ring, mma)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        transfer: cpasync.TmaInfo,
        shared: cutlass.Constexpr[Shared],
        ring: cutlass.Constexpr[Any],
        mma: Mmas,
    ) -> None:
        """A part of the keys, by three roles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp == 0:
                self.producer.run(arguments, part, transfer, shared, ring)
        elif warp < 8:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumers[0].run(arguments, part, shared, ring, mma)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumers[1].run(arguments, part, shared, ring, mma)
