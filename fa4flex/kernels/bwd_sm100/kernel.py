"""The Blackwell backward kernel: descriptors and launch on the host, and on the device the split into roles.

load warp --[k, v once; q, dout rings]--> multiply warp <--(S, dP; P, dS)--> compute warpgroups --> dk, dv
          --[lse2, delta rings]--------------------+---------------------------------^
                                                   +--(dQ)--> reduce warpgroup --> dq_sum
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4flex.kernels.bwd_sm100.compute import Compute
from fa4flex.kernels.bwd_sm100.config import COLUMNS, ROWS
from fa4flex.kernels.bwd_sm100.load import Block, Load, Transfers
from fa4flex.kernels.bwd_sm100.mma import Mma
from fa4flex.kernels.bwd_sm100.reduce import PIECE, Reduce
from fa4flex.kernels.bwd_sm100.resources import NUMBERS, OF_QUERIES, Products, Shared
from fa4flex.kernels.bwd_sm100.roles import (
    ALLOCATED,
    COMPUTE,
    FINISHED,
    LOAD,
    MULTIPLY,
    WARPS,
    barrier_table,
)
from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyGrid
from fa4flex.kernels.common.barriers import Pipes, arrive, initialise, mbarriers, pipes_of, room, sync
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.kernels.common.transfer import tokens_first


class Backward:
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "backward"
    """Schema of its arguments."""

    # Pairs and wide heads have others of these.
    roles: Any = Load, Mma, Compute, Reduce
    transfers_kind: Any = Transfers
    barrier_table: Any = staticmethod(barrier_table)
    numbers: tuple[str, ...] = NUMBERS
    operands: tuple[str, ...] = ("q", "k", "v", "dout", "ds")
    """Names of Shared's tensors with bytes of their own; other operands are these with rows and columns
    exchanged."""

    def __init__(self, config: Any, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = self.barrier_table(config)
        cluster = self.cluster = Cluster(config.ctas)
        scheduler = self.scheduler = BackwardTileScheduler(config, hooks, config.ctas)
        load, multiply, compute, reduce = self.roles
        self.load = load(config, scheduler, cluster)
        self.multiply = multiply(config, scheduler, cluster)
        self.compute = compute(config, hooks, scheduler, cluster)
        self.reduce = reduce(config, scheduler, cluster)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream: cuda.CUstream) -> None:
        grid, ctas = self.scheduler.grid(arguments), self.config.ctas
        self.device(arguments, grid, self.transfers(arguments)).launch(
            grid=[grid.total * ctas, 1, 1],
            block=[32 * WARPS, 1, 1],
            cluster=[ctas, 1, 1] if const_expr(ctas > 1) else None,
            stream=stream,
            min_blocks_per_mp=1,  # without it the compiler drops the register split
        )

    def products(self, arguments: BackwardArguments) -> Any:
        return Products(self.config, arguments.q.element_type, self.cluster)

    def transfers(self, arguments: BackwardArguments) -> Any:
        products = self.products(arguments)
        layouts = {name: cute.select(x, mode=[0, 1, 2]) for name, x in products.layouts().items()}
        load = cpasync.CopyBulkTensorTileG2SOp(self.cluster.group)
        cluster = self.cluster.layout(products.scores).shape

        def one(name: str) -> cpasync.TmaInfo:
            product, tile, first = products.operands[name]
            make = cute.nvgpu.make_tiled_tma_atom_A if first else cute.nvgpu.make_tiled_tma_atom_B
            return make(load, self.whole(name, arguments), layouts[name], tile, product, cluster)

        return self.transfers_kind(**{name: one(name) for name in self.transfers_kind._fields})

    def whole(self, name: str, arguments: BackwardArguments) -> cute.Tensor:
        """The global tensor of an operand, as `Transfers` has it."""
        return tokens_first(getattr(arguments, name), self.config.ragged)

    def stages(self, name: str) -> int:
        return self.config.q_stages if name in OF_QUERIES else self.config.do_stages

    def storage(self, products: Products) -> Any:
        members: dict[str, Any] = {"barriers": room(self.barriers), "freed": Int64, "columns": Int32}
        for name in self.numbers:
            size = self.config.tile_m * self.stages(name)
            members[name] = cute.struct.Align[cute.struct.MemRange[Float32, size], 128]
        layouts = products.layouts()
        for name in self.operands:
            size = cute.cosize(layouts[name])
            # TMA swizzles by 1024 bytes.
            members[name] = cute.struct.Align[cute.struct.MemRange[products.kind, size], 1024]
        if self.config.dq_stages:
            size = PIECE * 4 * self.config.dq_stages
            members["dq"] = cute.struct.Align[cute.struct.MemRange[Float32, size], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(self, arguments: BackwardArguments, grid: KeyGrid, transfers: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        registers = self.config.registers
        products = self.products(arguments)
        storage = SmemAllocator().allocate(self.storage(products))
        shared = self.shared(storage, products)
        pipes = self.pipes(storage, shared, products)
        allocated = pipeline.NamedBarrier(ALLOCATED.number, ALLOCATED.threads)
        memory = tensor_memory(storage, COMPUTE, allocated, self.config.ctas)
        if warp == LOAD:
            for transfer in transfers:
                cpasync.prefetch_descriptor(transfer.atom)
        if warp == 0:
            initialise(self.barriers, storage)
        ctas = self.cluster.layout(products.scores)
        pipeline.pipeline_init_arrive(cluster_shape_mn=ctas, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=ctas)
        work = self.scheduler.work(self.scheduler.first(), grid, arguments)
        if warp >= MULTIPLY:
            cute.arch.setmaxregister_decrease(registers.other)
            if warp == MULTIPLY:
                memory.wait_for_alloc()
                base = memory.retrieve_ptr(Float32)
                self.multiply.run(arguments, work, shared, pipes, products, base)
            if warp == LOAD:
                self.load.run(arguments, work, Block(transfers, shared, pipes, products))
        elif warp >= COMPUTE:
            cute.arch.setmaxregister_increase(registers.compute)
            memory.allocate(COLUMNS)
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.compute.run(arguments, work, shared, pipes, base)
            memory.relinquish_alloc_permit()
            sync(FINISHED)
            memory.free(base)
        else:
            cute.arch.setmaxregister_decrease(registers.reduce)
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.reduce.run(arguments, work, shared, pipes, base)
            arrive(FINISHED)
        self.cluster.depart()

    def shared(self, storage: Any, products: Any) -> Any:
        # A key's queries lie next to each other, 64 of them in a row of the swizzle.
        rows = cute.make_layout(((64, ROWS // 64), ROWS), stride=((1, 64 * ROWS), 64))
        return Shared(**self.tensors(storage, products, rows))

    def tensors(self, storage: Any, products: Any, ds_rows: cute.Layout) -> dict[str, cute.Tensor]:
        """Those of Shared by their names."""
        config = self.config
        return self.operand_tensors(storage, products) | {
            "ds_rows": storage.ds.get_tensor(ds_rows, swizzle=products.layouts()["ds"].inner),
            "lse2": storage.lse2.get_tensor(cute.make_layout((config.tile_m, config.q_stages))),
            "delta": storage.delta.get_tensor(cute.make_layout((config.tile_m, config.do_stages))),
            "dq": storage.dq.get_tensor(cute.make_layout((PIECE, 4, config.dq_stages)))
            if config.dq_stages
            else None,
        }

    def operand_tensors(self, storage: Any, products: Any) -> dict[str, cute.Tensor]:
        """Operands of products, by their names."""
        layouts = products.layouts()
        bytes_of = {name: name if name in self.operands else name.removesuffix("_t") for name in layouts}
        return {
            name: getattr(storage, bytes_of[name]).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        }

    def pipes(self, storage: Any, shared: Shared, products: Products) -> Pipes:
        cluster = self.cluster.layout(products.scores)
        at = mbarriers(self.barriers, storage)
        rings = dict.fromkeys(row.ring for row in self.barriers.rows if row.library)
        return pipes_of(
            at,
            **{
                name: operand_ring(at[f"{name}_full"], getattr(shared, name), self.config.ctas, cluster)
                for name in rings
            },
        )
