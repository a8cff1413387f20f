"""The Blackwell kernel for few queries over latent rows: descriptor and launch on the host, and on the device
the split into roles.

load warp --[k ring]--> multiply warp --(scores, output)--> softmax warps --> out, or a part of it in the
                                      <--(queries, probabilities)--           workspace
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4flex.kernels.combine.split_forward import SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Part, part_of
from fa4flex.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.kernels.common.transfer import prefetch_descriptors
from fa4flex.kernels.decode_sm100.roles import ALLOCATED, LOAD, MULTIPLY
from fa4flex.kernels.mla_decode_sm100.config import Config
from fa4flex.kernels.mla_decode_sm100.load import Producer, transfer_of
from fa4flex.kernels.mla_decode_sm100.mma import Mma
from fa4flex.kernels.mla_decode_sm100.resources import Products, Shared, shared_of, storage_of
from fa4flex.kernels.mla_decode_sm100.roles import barrier_table
from fa4flex.kernels.mla_decode_sm100.softmax import Softmax


class Forward(SplitForward):
    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages)
        self.load = Producer(config, hooks)
        self.mma = Mma(config, hooks)  # type: ignore[arg-type]
        self.softmax = Softmax(config, hooks)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        layouts = Products(self.config, arguments.q.element_type).layouts()
        transfer = transfer_of(arguments, layouts.k, self.config)
        self.launch(self.device(arguments, transfer), arguments, stream)

    @cute.kernel
    def device(self, arguments: Arguments, transfer: cpasync.TmaInfo) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        products = Products(self.config, arguments.q.element_type)
        layouts = products.layouts()
        storage = SmemAllocator().allocate(storage_of(room(self.barriers), layouts, products.kind))
        shared = shared_of(storage, layouts, self.config)
        at = mbarriers(self.barriers, storage)
        pipes = pipes_of(at, k=operand_ring(at["k_full"], shared.k_operand))
        memory = tensor_memory(storage, 0, pipeline.NamedBarrier(ALLOCATED.number, ALLOCATED.threads))
        if warp == LOAD:
            prefetch_descriptors(transfer)
        if warp == 0:
            initialise(self.barriers, storage)
        part = part_of(cute.arch.block_idx()[0], arguments, self.config.slice_rows)
        part = part._replace(splits=cute.arch.make_warp_uniform(part.splits))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        # What merges splits may be launched now: it waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if part.split < part.splits:
            self.work(arguments, part, transfer, shared, pipes, products, memory)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        transfer: cpasync.TmaInfo,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        memory: cutlass.Constexpr[Any],
    ) -> None:
        """A part of the keys, by three roles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD:
            self.load.run(arguments, part, transfer, shared.k, pipes.k)
        elif warp == MULTIPLY:
            memory.wait_for_alloc()
            first = memory.retrieve_ptr(Float32)
            self.mma.run(arguments, part, shared, pipes, products, first)
        else:
            memory.allocate(self.config.memory.allocated)
            memory.relinquish_alloc_permit()
            memory.wait_for_alloc()
            first = memory.retrieve_ptr(Float32)
            self.softmax.run(arguments, part, shared, pipes, products, first)
            memory.free(first)
