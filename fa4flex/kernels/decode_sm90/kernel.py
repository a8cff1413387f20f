"""The Hopper kernel for few query rows: descriptors and launch on the host, and on the device the split into
roles.

producer warp --[k ring]--> consumer warpgroup --> out, or a part of it in the workspace
              --[v ring]-->
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings import driver as cuda
from cutlass import Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.combine.split_forward import SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room
from fa4flex.kernels.common.boxes import KeyLayouts, Layouts, stage_layouts
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Part, part_of
from fa4flex.kernels.common.products import ROWS, Mmas, tiled_products
from fa4flex.kernels.common.split_producer import Producer, Stages, stage_transfers
from fa4flex.kernels.common.transfer import Transfers, prefetch_descriptors, tile_room
from fa4flex.kernels.decode_sm90.config import Config
from fa4flex.kernels.decode_sm90.consumer import Consumer
from fa4flex.kernels.decode_sm90.resources import Shared
from fa4flex.kernels.decode_sm90.roles import barrier_table
from fa4flex.kernels.decode_sm90.skipping import Asked, AskedProducer, AskingConsumer, asked_of


class Forward(SplitForward):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages, config.gather_warps, asks=bool(config.skip))
        self.producer: Any = (AskedProducer if config.skip else Producer)(config, hooks)
        self.consumer: Any = (AskingConsumer if config.skip else Consumer)(config, hooks)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        kind = arguments.q.element_type
        layouts = self.layouts(kind)
        k, v = stage_transfers(arguments, self.config, KeyLayouts(layouts.k, layouts.v))
        mma = tiled_products(kind, self.config.tile_n, self.config.head_dim_v)
        self.launch(self.device(arguments, k, v, mma), arguments, stream)

    def layouts(self, kind: Any) -> Layouts:
        """Swizzled shared-memory layouts of q, k, v; their last mode counts stages."""
        tile = ROWS, self.config.tile_n, self.config.head_dim
        q = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, kind, 1)
        return Layouts(q, *stage_layouts(self.config, kind))

    def storage(self, layouts: Layouts, kind: Any) -> Any:
        members = {"barriers": room(self.barriers)}
        if self.config.skip:
            members["asked"] = cute.struct.MemRange[Int32, self.config.kv_stages]
        members |= {
            "queries": tile_room(kind, cute.cosize(layouts.q)),
            "keys": tile_room(kind, cute.cosize(layouts.k)),
            "values": tile_room(kind, cute.cosize(layouts.v)),
        }
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(
        self,
        arguments: Arguments,
        k: cpasync.TmaInfo | None,
        v: cpasync.TmaInfo | None,
        mma: Mmas,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        transfers = Transfers(None, k, v, None)
        if warp == 0:
            prefetch_descriptors(k, v)
        kind = arguments.q.element_type
        layouts = self.layouts(kind)
        storage = SmemAllocator().allocate(self.storage(layouts, kind))
        shared = self.shared(storage, layouts)
        pipes = self.pipes(storage, shared)
        asked = None
        if const_expr(self.config.skip):
            asked = asked_of(storage, self.config.kv_stages, pipes.asked_full)
            if warp == 0:
                initialise(self.barriers, storage)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config.slice_rows)
        # The same in all lanes, which the compiler does not see: it would move numbers of stages, which
        # follow from a block's part, from each lane's registers before every product.
        part = part._replace(splits=cute.arch.make_warp_uniform(part.splits))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        # What merges splits may be launched now: it waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if part.split < part.splits:
            self.work(arguments, part, transfers, shared, pipes, mma, asked)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: Mmas,
        asked: cutlass.Constexpr[Asked | None],
    ) -> None:
        """A part of the keys, by two roles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if self.config.brings(warp):
                stages = Stages(shared.k, shared.v, pipes.k, pipes.v)
                if const_expr(asked is None):
                    self.producer.run(arguments, part, transfers, stages)
                else:
                    self.producer.run_asked(arguments, part, transfers, stages, asked)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            if const_expr(asked is None):
                self.consumer.run(arguments, part, shared, pipes, mma)
            else:
                self.consumer.run_asking(arguments, part, shared, pipes, mma, asked)

    def shared(self, storage: Any, layouts: Layouts) -> Shared:
        q, k, v = layouts
        return Shared(
            storage.queries.get_tensor(q.outer, swizzle=q.inner),
            storage.keys.get_tensor(k.outer, swizzle=k.inner),
            storage.values.get_tensor(v.outer, swizzle=v.inner),
        )

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, table, warps = mbarriers(self.barriers, storage), self.barriers, self.config.gather_warps
        return pipes_of(
            at,
            k=tile_ring(at["k_full"], shared.k, table["k_empty"].arrivals, warps),
            v=tile_ring(at["v_full"], shared.v, table["v_empty"].arrivals, warps),
        )
