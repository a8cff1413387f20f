"""The Blackwell kernel for listed keys: launch on the host, and on the device the split into roles.

              ,--[ids ring]--> softmax warps <--(scores, output)-----------.
4 producers --+--[k ring]----> multiply warp --(queries, probabilities)--> softmax warps --> out, or a part of
              '--[v ring]---->                                                           it in the workspace
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, const_expr, cute, pipeline
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import initialise, sync
from fa4flex.kernels.common.boxes import KeyLayouts, stage_layouts
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.tensor_core import tensor_memory
from fa4flex.kernels.decode_sm100 import kernel as base
from fa4flex.kernels.decode_sm100.mma import Mma
from fa4flex.kernels.decode_sm100.resources import Products
from fa4flex.kernels.decode_sm100.roles import ALLOCATED
from fa4flex.kernels.lists import producer as gathering
from fa4flex.kernels.lists.entries import entries_of
from fa4flex.kernels.lists.forward import ListsForward
from fa4flex.kernels.lists.gathering import Gathering
from fa4flex.kernels.lists.resources import behind, entry_members, entry_tensors
from fa4flex.kernels.lists.tiles import ListTile, Part, part_of, tile_of
from fa4flex.kernels.lists_sm100.config import Config
from fa4flex.kernels.lists_sm100.resources import Handed, Shared
from fa4flex.kernels.lists_sm100.roles import GATHER, LISTED, MULTIPLY, barrier_table
from fa4flex.kernels.lists_sm100.softmax import Softmax


class Producer(gathering.Producer):
    first_warp = GATHER


class Forward(Gathering, ListsForward, base.Forward):
    config: Config
    softmax: Softmax
    listed = LISTED

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config.kv_stages)
        self.producer = Producer(config)
        self.mma = Mma(config, hooks)
        self.softmax = Softmax(config, hooks)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        self.launch(self.device(arguments), arguments, stream)

    def members(self, layouts: KeyLayouts, kind: Any) -> dict[str, Any]:
        plain = super().members(layouts, kind)
        tiles = {name: plain.pop(name) for name in ("keys", "values")}
        numbers = sum(cute.cosize(x) for x in layouts) * kind.width // 32
        return {**plain, **entry_members(self.config), **tiles, "behind": behind(numbers)}

    def shared(self, storage: Any, layouts: KeyLayouts, products: Products) -> Shared:
        plain = super().shared(storage, layouts, products)
        return Shared(**vars(plain), **entry_tensors(storage, plain.k, self.config))

    @cute.kernel
    def device(self, arguments: Arguments) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kind = arguments.q.element_type
        products, layouts = Products(self.config, kind), stage_layouts(self.config, kind)
        storage = SmemAllocator().allocate(self.storage(layouts, kind))
        shared = self.shared(storage, layouts, products)
        pipes = self.pipes(storage, shared)
        memory = tensor_memory(storage, 0, pipeline.NamedBarrier(ALLOCATED.number, ALLOCATED.threads))
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
            self.work(arguments, part, tile, Handed(shared, pipes, products), memory)

    @cute.jit
    def work(
        self,
        arguments: Arguments,
        part: Part,
        tile: ListTile,
        handed: cutlass.Constexpr[Handed],
        memory: cutlass.Constexpr[Any],
    ) -> None:
        """A part of the keys of a tile, by three roles."""
        entries = entries_of(part, arguments, self.config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp >= MULTIPLY:
            memory.wait_for_alloc()
            first = memory.retrieve_ptr(Float32)
            sync(self.listed)
            self.multiply(arguments, part, tile, entries, handed, first)
        elif warp >= GATHER:
            cute.arch.setmaxregister_decrease(self.config.gather_registers)
            thread = cute.arch.thread_idx()[0] - 32 * GATHER
            self.gather(arguments, part, tile, entries, handed[:2], thread)
        else:
            cute.arch.setmaxregister_increase(self.config.softmax_registers)
            memory.allocate(self.config.memory.allocated)
            # The other block of the multiprocessor allocates as well.
            memory.relinquish_alloc_permit()
            memory.wait_for_alloc()
            first = memory.retrieve_ptr(Float32)
            self.take_softmax(arguments, part, tile, entries, handed, first)
            memory.free(first)

    def multiply(
        self, arguments: Arguments, part: Part, tile: ListTile, entries: Any, handed: Handed, first: Any
    ) -> None:
        """All products. first: column of tensor memory."""
        tile, _ = self.keys(arguments, part, tile, entries, handed.shared)
        self.mma.multiply(tile, *handed, first)

    def take_softmax(
        self, arguments: Arguments, part: Part, tile: ListTile, entries: Any, handed: Handed, first: Any
    ) -> None:
        """Queries, probabilities and the output."""
        sync(self.listed)
        tile, walk = self.keys(arguments, part, tile, entries, handed.shared)
        self.softmax.visit(arguments, tile, walk, handed, first)
