"""The Hopper backward kernel for listed keys: launch on the host, and on the device the split into roles.

              ,--[ids ring]--.
4 producers --+--[k ring]----+-> consumer warpgroup --> dq; additions to dk_sum and dv_sum
              '--[v ring]----'
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import cute, pipeline
from cutlass.memory import SmemAllocator

from fa4flex.kernels.bwd_lists_sm90.after import KeyGradients
from fa4flex.kernels.bwd_lists_sm90.arguments import KeyGradientArguments, ListsBackwardArguments
from fa4flex.kernels.bwd_lists_sm90.config import Config
from fa4flex.kernels.bwd_lists_sm90.consumer import Consumer
from fa4flex.kernels.bwd_lists_sm90.resources import (
    Shared,
    layouts_of,
    members_of,
    mmas_of,
    shared_of,
)
from fa4flex.kernels.bwd_lists_sm90.roles import barrier_table
from fa4flex.kernels.common.barriers import Pipes, initialise, room, sync
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.lists.entries import entries_of
from fa4flex.kernels.lists.producer import Producer
from fa4flex.kernels.lists.roles import listed
from fa4flex.kernels.lists.tiles import (
    ListTile,
    Part,
    part_of,
    tile_of,
    tiles_of_launch,
)
from fa4flex.kernels.lists_sm90.gathering import Gathering
from fa4flex.kernels.plan.target import ALL_SHARED


class Backward(Gathering):
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    config: Config

    direction = "listed_backward"
    """Schema of its arguments."""

    arguments = ListsBackwardArguments
    """Named tuple that it is called with."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages, config.v_stages)
        self.listed = listed(config.threads // 32)
        self.producer = Producer(config)
        self.consumer = Consumer(config, hooks)

    @property
    def after(self) -> tuple[Any, Any]:
        """The launches after it, and the named tuple that they are called with."""
        return KeyGradients(self.config), KeyGradientArguments

    @cute.jit
    def __call__(self, arguments: ListsBackwardArguments, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(
            grid=[tiles_of_launch(arguments, self.config), 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.config.blocks,
            preferred_smem_carveout=ALL_SHARED,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: ListsBackwardArguments) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kind = arguments.q.element_type
        layouts = layouts_of(self.config, kind)
        members = {"barriers": room(self.barriers), **members_of(layouts, kind, self.config)}
        storage = SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": members})))
        shared = shared_of(storage, layouts, self.config)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config)
        tile = tile_of(part, arguments, self.config)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        # All of a block: one that ended before the kernel before this one could let the next one begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if tile.tokens > 0:
            self.work(arguments, part, tile, (shared, pipes))

    @cute.jit
    def work(
        self,
        arguments: ListsBackwardArguments,
        part: Part,
        tile: ListTile,
        handed: cutlass.Constexpr[tuple[Shared, Pipes]],
    ) -> None:
        """A tile, by its roles."""
        shared, pipes = handed
        entries = entries_of(part, arguments, self.config)
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            self.gather(arguments, part, tile, entries, handed, thread)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumer.bring_rows(arguments, tile, shared, thread - 128)
            sync(self.listed)
            tile, walk = self.keys(arguments, part, tile, entries, shared)
            mmas = mmas_of(self.config, arguments.q.element_type)
            self.consumer.visit(arguments, tile, walk, shared, pipes, mmas)
