"""The Blackwell kernel for few query rows: descriptors and launch on the host, and on the device the split
into roles.

load warp --[k ring]--> multiply warp --(scores, output)--> softmax warps --> out, or a part of it in the
          --[v ring]-->               <--(queries, probabilities)--           workspace
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4flex.kernels.combine.split_forward import SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room
from fa4flex.kernels.common.boxes import KeyLayouts, stage_layouts
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Part, part_of
from fa4flex.kernels.common.split_producer import Producer, Stages, stage_transfers
from fa4flex.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.kernels.common.transfer import Transfers, prefetch_descriptors, tile_room
from fa4flex.kernels.decode_sm100.config import (
    LANES,
    MERGED,
    MERGED_STAGES,
    MERGED_STRIDE,
    Config,
    kept,
)
from fa4flex.kernels.decode_sm100.mma import Mma
from fa4flex.kernels.decode_sm100.resources import Products, Shared
from fa4flex.kernels.decode_sm100.roles import ALLOCATED, LOAD, MULTIPLY, barrier_table
from fa4flex.kernels.decode_sm100.softmax import Softmax


class Forward(SplitForward):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages, config.gather_warps)
        self.load = Producer(config, hooks)
        self.mma = Mma(config, hooks)
        self.softmax = Softmax(config, hooks)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        layouts = stage_layouts(self.config, arguments.q.element_type)
        k, v = stage_transfers(arguments, self.config, layouts)
        self.launch(self.device(arguments, k, v), arguments, stream)

    def storage(self, layouts: KeyLayouts, kind: Any) -> Any:
        return cute.struct(type("Storage", (), {"__annotations__": self.members(layouts, kind)}))

    def members(self, layouts: KeyLayouts, kind: Any) -> dict[str, Any]:
        numbers = kept(self.config.statistics)
        return {
            "barriers": room(self.barriers),
            "freed": Int64,
            "columns": Int32,
            "statistics": cute.struct.Align[cute.struct.MemRange[Float32, numbers * LANES], 16],
            "keys": tile_room(kind, cute.cosize(layouts.k)),
            "values": tile_room(kind, cute.cosize(layouts.v)),
        }

    @cute.kernel
    def device(self, arguments: Arguments, k: cpasync.TmaInfo | None, v: cpasync.TmaInfo | None) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kind = arguments.q.element_type
        products, layouts = Products(self.config, kind), stage_layouts(self.config, kind)
        storage = SmemAllocator().allocate(self.storage(layouts, kind))
        shared = self.shared(storage, layouts, products)
        pipes = self.pipes(storage, shared)
        memory = tensor_memory(storage, 0, pipeline.NamedBarrier(ALLOCATED.number, ALLOCATED.threads))
        if warp == LOAD:
            prefetch_descriptors(k, v)
        if warp == 0:
            initialise(self.barriers, storage)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config.slice_rows)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        # What merges splits may be launched now: it waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if part.split < part.splits:
            self.work(arguments, part, Transfers(None, k, v, None), shared, pipes, products, memory)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        memory: cutlass.Constexpr[Any],
    ) -> None:
        """A part of the keys, by three roles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD:
            self.load.run(arguments, part, transfers, Stages(shared.k, shared.v, pipes.k, pipes.v))
        elif warp == MULTIPLY:
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.mma.run(arguments, part, shared, pipes, products, base)
        else:
            memory.allocate(self.config.memory.allocated)
            # The other block of the multiprocessor allocates as well.
            memory.relinquish_alloc_permit()
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.softmax.run(arguments, part, shared, pipes, products, base)
            memory.free(base)

    def shared(self, storage: Any, layouts: KeyLayouts, products: Products) -> Shared:
        (k, v), (k_operand, v_operand) = layouts, products.layouts()
        merged = cute.make_layout(
            (MERGED, LANES, MERGED_STAGES), stride=(1, MERGED_STRIDE, LANES * MERGED_STRIDE)
        )
        ring = {"k": storage.keys, "v": storage.values}[self.config.merges_over]
        start = cute.recast_ptr(ring.data_ptr(), dtype=Float32)
        numbers = kept(self.config.statistics)
        return Shared(
            storage.keys.get_tensor(k.outer, swizzle=k.inner),
            storage.values.get_tensor(v.outer, swizzle=v.inner),
            storage.keys.get_tensor(k_operand.outer, swizzle=k_operand.inner),
            storage.values.get_tensor(v_operand.outer, swizzle=v_operand.inner),
            storage.statistics.get_tensor(cute.make_layout((LANES, numbers), stride=(numbers, 1))),
            cute.make_tensor(start, merged),
        )

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, warps = mbarriers(self.barriers, storage), self.config.gather_warps
        return pipes_of(
            at,
            k=operand_ring(at["k_full"], shared.k_operand, gather_warps=warps),
            v=operand_ring(at["v_full"], shared.v_operand, gather_warps=warps),
        )
