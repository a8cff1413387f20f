"""The Hopper kernel for few query rows over an e4m3 cache: descriptors and launch on the host, and on the
device the split into roles.

producer warp --[k ring]--> four consumer warps --> out, or a part of it in the workspace
              --[v ring]-->
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings import driver as cuda
from cutlass import Float32, Uint8, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.combine.split_forward import SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, mbarriers, pipes_of, room
from fa4flex.kernels.common.boxes import KeyLayouts
from fa4flex.kernels.common.gathering_rings import GatheringRing, tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Part, part_of
from fa4flex.kernels.common.split_producer import Stages
from fa4flex.kernels.common.transfer import Transfers, prefetch_descriptors, reordered, tile_room
from fa4flex.kernels.decode_fp8_sm90.config import ROWS, WARPS, Config, span
from fa4flex.kernels.decode_fp8_sm90.consumer import Consumer
from fa4flex.kernels.decode_fp8_sm90.producer import Producer
from fa4flex.kernels.decode_fp8_sm90.resources import Shared
from fa4flex.kernels.decode_fp8_sm90.roles import MEET
from fa4flex.kernels.decode_sm90.roles import barrier_table


class Forward(SplitForward):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages, config.gather_warps, MEET)
        self.producer = Producer(config, hooks)
        self.consumer = Consumer(config, hooks)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        k, v = self.transfers(arguments)
        self.launch(self.device(arguments, k, v), arguments, stream)

    def layouts(self) -> KeyLayouts:
        """Swizzled shared-memory layouts of k and v, row by row; their last mode counts stages."""
        config = self.config
        k, v = (
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, config.tile_n, width), Uint8, config.kv_stages)
            for width in (config.head_dim, config.head_dim_v)
        )
        return KeyLayouts(k, v)

    def transfers(self, arguments: Arguments) -> tuple[Any, Any]:
        config, load = self.config, cpasync.CopyBulkTensorTileG2SOp()
        if config.gathers:
            return None, None
        found = []
        widths = config.head_dim, config.head_dim_v
        for given, layout, width in zip((arguments.k, arguments.v), self.layouts(), widths):
            tensor = reordered(given, [1, 3, 2, 0])
            if config.paged:
                box = config.box_rows, span(width)
                inside = cute.make_layout(box, stride=(span(width), 1))
                layout = cute.make_composed_layout(layout.inner, 0, inside)
                found.append(cpasync.make_tiled_tma_atom(load, tensor, layout, box))
            else:
                layout = cute.slice_(layout, (None, None, 0))
                found.append(cpasync.make_tiled_tma_atom(load, tensor, layout, (config.tile_n, width)))
        return found[0], found[1]

    def storage(self, layouts: KeyLayouts) -> Any:
        config = self.config
        members = {
            "barriers": room(self.barriers),
            "queries": tile_room(Uint8, config.query_bytes),
            "keys": tile_room(Uint8, cute.cosize(layouts.k)),
            "values": tile_room(Uint8, cute.cosize(layouts.v)),
        }
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(self, arguments: Arguments, k: cpasync.TmaInfo | None, v: cpasync.TmaInfo | None) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        transfers = Transfers(None, k, v, None)
        if warp == 0:
            prefetch_descriptors(k, v)
        layouts = self.layouts()
        storage = SmemAllocator().allocate(self.storage(layouts))
        shared = self.shared(storage, layouts)
        pipes = self.pipes(storage, shared)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config.slice_rows)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        # What merges splits may be launched now: it waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if part.split < part.splits:
            self.work(arguments, part, transfers, shared, pipes)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        """A part of the keys, by two roles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if self.config.brings(warp):
                self.producer.run(arguments, part, transfers, Stages(shared.k, shared.v, pipes.k, pipes.v))
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumer.run(arguments, part, shared, pipes)

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, table, warps = mbarriers(self.barriers, storage), self.barriers, self.config.gather_warps
        return pipes_of(
            at,
            k=tile_ring(at["k_full"], shared.k, table["k_empty"].arrivals, warps, GatheringRing),
            v=tile_ring(at["v_full"], shared.v, table["v_empty"].arrivals, warps, GatheringRing),
        )

    def shared(self, storage: Any, layouts: KeyLayouts) -> Shared:
        k, v = layouts
        keys, values = (cute.recast_ptr(x.data_ptr(), dtype=Float32) for x in (storage.keys, storage.values))
        width = self.config.head_dim_v
        return Shared(
            storage.keys.get_tensor(k.outer, swizzle=k.inner),
            storage.values.get_tensor(v.outer, swizzle=v.inner),
            storage.queries.data_ptr().toint(),
            storage.keys.data_ptr().toint(),
            storage.values.data_ptr().toint(),
            cute.make_tensor(values, cute.make_layout((WARPS, ROWS, width), stride=(ROWS * width, width, 1))),
            cute.make_tensor(keys, cute.make_layout((WARPS, ROWS, 4), stride=(ROWS * 4, 4, 1))),
        )
