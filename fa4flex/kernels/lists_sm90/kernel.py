"""The Hopper kernel for listed keys: launch on the host, and on the device the split into roles.

              ,--[ids ring]--.
4 producers --+--[k ring]----+-> consumer warpgroups --> out, or a part of it in the workspace
              '--[v ring]----'
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings import driver as cuda
from cutlass import const_expr, cute, pipeline
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, room, sync
from fa4flex.kernels.common.boxes import stage_layouts
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.products import ROWS, tiled_products
from fa4flex.kernels.lists.entries import entries_of
from fa4flex.kernels.lists.forward import ListsForward
from fa4flex.kernels.lists.producer import Producer
from fa4flex.kernels.lists.tiles import (
    ListTile,
    Part,
    part_of,
    tile_of,
)
from fa4flex.kernels.lists_sm90.config import Config
from fa4flex.kernels.lists_sm90.consumer import Consumer, SharingConsumer
from fa4flex.kernels.lists_sm90.gathering import Gathering
from fa4flex.kernels.lists_sm90.resources import members_of, shared_of
from fa4flex.kernels.lists_sm90.roles import barrier_table, listed


class Forward(Gathering, ListsForward):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages, config.consumers)
        self.listed = listed(config.threads // 32)
        self.producer = Producer(config)
        self.consumer = (Consumer if config.consumers == 1 else SharingConsumer)(config, hooks)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        mma = tiled_products(arguments.q.element_type, self.config.tile_n, self.config.head_dim_v)
        self.launch(self.device(arguments, mma), arguments, stream)

    def layouts(self, kind: Any) -> tuple[Any, Any, Any]:
        """Swizzled shared-memory layouts of q, k, v; their last mode counts consumers, or stages."""
        tile = ROWS, self.config.tile_n, self.config.head_dim
        q = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, kind, self.config.consumers)
        return q, *stage_layouts(self.config, kind)

    def members(self, layouts: Any, kind: Any) -> dict[str, Any]:
        """Members of a block's shared memory, behind barriers."""
        return members_of(layouts, kind, self.config)

    def shared(self, storage: Any, layouts: Any) -> Any:
        """Tensors there."""
        return shared_of(storage, layouts, self.config)

    @cute.kernel
    def device(self, arguments: Arguments, mma: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kind = arguments.q.element_type
        layouts = self.layouts(kind)
        members = {"barriers": room(self.barriers), **self.members(layouts, kind)}
        storage = SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": members})))
        shared = self.shared(storage, layouts)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config)
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
        handed: cutlass.Constexpr[tuple[Any, Pipes]],
        mma: Any,
    ) -> None:
        """A part of the keys of a tile, by its roles."""
        entries = entries_of(part, arguments, self.config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            self.gather(arguments, part, tile, entries, handed, cute.arch.thread_idx()[0])
        else:
            self.consume(arguments, part, tile, entries, handed, mma)

    def consume(
        self, arguments: Arguments, part: Part, tile: ListTile, entries: Any, handed: Any, mma: Any
    ) -> None:
        """Warpgroups that multiply. handed: shared memory and pipes."""
        shared, pipes = handed
        cute.arch.setmaxregister_increase(self.config.consumer_registers)
        self.consumer.bring_queries(arguments, tile, shared, cute.arch.thread_idx()[0] - 128)
        sync(self.listed)
        tile, walk = self.keys(arguments, part, tile, entries, shared)
        self.consumer.visit(arguments, tile, walk, shared, pipes, mma)
