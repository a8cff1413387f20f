"""The Hopper kernel for sums of probabilities per key: descriptors and launch on the host, and on the device
the split into roles.

producer warp --[k once; q and lse2 ring]--> consumer warpgroups --> mass

A block has one tile of keys of one query head: no two blocks add to the same sum.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda
from cutlass import Float32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from fa4flex.kernels.bwd_sm90.resources import swizzled_rows
from fa4flex.kernels.common.backward import BackwardTileScheduler, KeyGrid
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.products import tiled_product
from fa4flex.kernels.common.transfer import tile_room, tokens_first
from fa4flex.kernels.mass_sm90.arguments import MassArguments
from fa4flex.kernels.mass_sm90.config import Config
from fa4flex.kernels.mass_sm90.consumer import Consumer
from fa4flex.kernels.mass_sm90.producer import Producer
from fa4flex.kernels.mass_sm90.resources import Shared, Transfers
from fa4flex.kernels.mass_sm90.roles import barrier_table


class Mass:
    """A kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "mass"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = BackwardTileScheduler(config, hooks, packed_sections=True)
        self.producer = Producer(config, self.scheduler)
        self.consumer = Consumer(config, hooks, self.scheduler)
        self.barriers = barrier_table(config)

    @cute.jit
    def __call__(self, arguments: MassArguments, stream: cuda.CUstream) -> None:
        grid = self.scheduler.grid(arguments)
        self.device(arguments, grid, *vars(self.transfers(arguments)).values()).launch(
            grid=[grid.total, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it the compiler drops the register split
        )

    def layouts(self, kind: Any) -> tuple[Any, Any]:
        """Swizzled shared-memory layouts of q, by stage, and k."""
        config = self.config
        m, n, d = config.tile_m, config.tile_n, config.head_dim
        return (
            swizzled_rows(kind, (m, d, config.q_stages), config.swizzle),
            swizzled_rows(kind, (n, d, 1), config.swizzle),
        )

    def transfers(self, arguments: MassArguments) -> Transfers:
        config, load = self.config, cpasync.CopyBulkTensorTileG2SOp()
        layouts = (cute.slice_(x, (None, None, 0)) for x in self.layouts(arguments.q.element_type))
        rows, tensors = (config.tile_m, config.tile_n), (arguments.q, arguments.k)
        q, k = (
            cpasync.make_tiled_tma_atom(load, tokens_first(x, config.ragged), layout, (n, config.head_dim))
            for x, layout, n in zip(tensors, layouts, rows, strict=True)
        )
        return Transfers(q, k)

    def product(self, kind: Any) -> cute.TiledMma:
        """The product S = K Q' of a warpgroup."""
        return tiled_product(kind, (OperandMajorMode.K, OperandMajorMode.K), self.config.tile_m)

    def storage(self, kind: Any) -> Any:
        config = self.config
        q, k = (cute.cosize(x) for x in self.layouts(kind))
        numbers = cute.struct.MemRange[Float32, config.tile_m * config.q_stages]
        members = {
            "barriers": room(self.barriers),
            "lse2": cute.struct.Align[numbers, 128],
            "q": tile_room(kind, q),
            "k": tile_room(kind, k),
        }
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(self, arguments: MassArguments, grid: KeyGrid, q: cpasync.TmaInfo, k: cpasync.TmaInfo) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for transfer in (q, k):
                cpasync.prefetch_descriptor(transfer.atom)
        kind = arguments.q.element_type
        storage = SmemAllocator().allocate(self.storage(kind))
        shared = self.shared(storage, kind)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp == 0:
                self.producer.run(arguments, grid, Transfers(q, k), shared, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumer.run(arguments, grid, shared, pipes, self.product(kind))

    def shared(self, storage: Any, kind: Any) -> Shared:
        q, k = self.layouts(kind)
        return Shared(
            storage.q.get_tensor(q.outer, swizzle=q.inner),
            storage.k.get_tensor(k.outer, swizzle=k.inner)[None, None, 0],
            storage.lse2.get_tensor(cute.make_layout((self.config.tile_m, self.config.q_stages))),
        )

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        thread, at = pipeline.Agent.Thread, mbarriers(self.barriers, storage)
        stage = cute.size_in_bytes(shared.q.element_type, cute.select(shared.q.layout, mode=[0, 1]))
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.config.q_stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, self.barriers["q_empty"].arrivals),
            tx_count=stage + 4 * self.config.tile_m,
            barrier_storage=at["q_full"],
            defer_sync=True,
        )
        return pipes_of(at, q=ring)
