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
from fa4flex.kernels.bwd_sm100.config import COLUMNS, ROWS, Config
from fa4flex.kernels.bwd_sm100.load import Load, Transfers
from fa4flex.kernels.bwd_sm100.mma import Mma
from fa4flex.kernels.bwd_sm100.reduce import PIECE, Reduce
from fa4flex.kernels.bwd_sm100.resources import Pipes, Products, Shared
from fa4flex.kernels.bwd_sm100.roles import (
    ALLOCATED,
    BARRIERS,
    COMPUTE,
    FINISHED,
    LOAD,
    MULTIPLY,
    READ_TENSOR_MEMORY,
    RINGS,
    STATISTICS,
    TOUCH_TENSOR_MEMORY,
    WARPS,
)
from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyGrid
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.kernels.common.transfer import tokens_first

NUMBERS = ("lse2", "delta")
"""Statistics of rows, in rings of their own."""


class Backward:
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "backward"
    """Schema of its arguments."""

    # CTA pairs have others of these: bwd_sm100/two_cta/kernel.py.
    roles: Any = Load, Mma, Compute, Reduce
    transfers_kind: Any = Transfers
    pipes_kind: Any = Pipes
    rings: tuple[str, ...] = RINGS
    barriers = BARRIERS
    operands: tuple[str, ...] = ("q", "k", "v", "dout", "ds")
    """Names of Shared's tensors with bytes of their own; other operands are these with rows and columns
    exchanged."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
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

    def products(self, arguments: BackwardArguments) -> Products:
        return Products(self.config, arguments.q.element_type, self.cluster)

    def transfers(self, arguments: BackwardArguments) -> Any:
        products = self.products(arguments)
        layouts = {name: cute.select(x, mode=[0, 1, 2]) for name, x in products.layouts().items()}
        load = cpasync.CopyBulkTensorTileG2SOp(self.cluster.group)
        cluster = self.cluster.layout(products.scores).shape
        first, second = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        of = {
            "q": (second, products.scores_tile, products.scores),
            "k": (first, products.scores_tile, products.scores),
            "v": (first, products.dprob_tile, products.dprob),
            "dout": (second, products.dprob_tile, products.dprob),
            "q_t": (second, products.dk_tile, products.dk),
            "k_t": (second, products.dq_tile, products.dq),
            "dout_t": (second, products.dv_tile, products.dv),
        }

        def one(name: str) -> cpasync.TmaInfo:
            make, tile, product = of[name]
            return make(load, self.whole(name, arguments), layouts[name], tile, product, cluster)

        return self.transfers_kind(**{name: one(name) for name in self.transfers_kind._fields})

    def whole(self, name: str, arguments: BackwardArguments) -> cute.Tensor:
        """The global tensor of an operand, as `Transfers` has it."""
        return tokens_first(getattr(arguments, name), self.config.ragged)

    def stages(self, name: str) -> int:
        return self.config.q_stages if name in ("q", "q_t", "lse2") else self.config.do_stages

    def storage(self, products: Products) -> Any:
        members: dict[str, Any] = dict.fromkeys(self.barriers, cute.struct.MemRange[Int64, 1])
        members |= {f"{name}_bar": cute.struct.MemRange[Int64, 2 * self.stages(name)] for name in self.rings}
        for name in NUMBERS:
            members |= {
                f"{name}_{side}": cute.struct.MemRange[Int64, self.stages(name)] for side in STATISTICS
            }
        members |= {"freed": Int64, "columns": Int32}
        for name in NUMBERS:
            members[name] = cute.struct.Align[cute.struct.MemRange[Float32, ROWS * self.stages(name)], 128]
        layouts = products.layouts()
        for name in self.operands:
            size = cute.cosize(layouts[name])
            # TMA swizzles by 1024 bytes.
            members[name] = cute.struct.Align[cute.struct.MemRange[products.kind, size], 1024]
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
        allocated = pipeline.NamedBarrier(ALLOCATED, TOUCH_TENSOR_MEMORY)
        memory = tensor_memory(storage, COMPUTE, allocated, self.config.ctas)
        if warp == LOAD:
            for transfer in transfers:
                cpasync.prefetch_descriptor(transfer.atom)
        if warp == 0:
            self.initialise(storage)
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
                self.load.run(arguments, work, transfers, shared, pipes, products)
        elif warp >= COMPUTE:
            cute.arch.setmaxregister_increase(registers.compute)
            memory.allocate(COLUMNS)
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.compute.run(arguments, work, shared, pipes, base)
            memory.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=FINISHED, number_of_threads=READ_TENSOR_MEMORY)
            memory.free(base)
        else:
            cute.arch.setmaxregister_decrease(registers.reduce)
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.reduce.run(arguments, work, shared, pipes, base)
            cute.arch.barrier_arrive(barrier_id=FINISHED, number_of_threads=READ_TENSOR_MEMORY)
        self.cluster.depart()

    def initialise(self, storage: Any) -> None:
        with cute.arch.elect_one():
            for name, arrivals in self.barriers.items():
                cute.arch.mbarrier_init(getattr(storage, name).data_ptr(), arrivals)
            for name in NUMBERS:
                for side, arrivals in STATISTICS.items():
                    for stage in range(self.stages(name)):
                        barrier = getattr(storage, f"{name}_{side}").data_ptr() + stage
                        cute.arch.mbarrier_init(barrier, arrivals)
        cute.arch.mbarrier_init_fence()

    def shared(self, storage: Any, products: Products) -> Shared:
        # A key's queries lie next to each other, 64 of them in a row of the swizzle.
        rows = cute.make_layout(((64, ROWS // 64), ROWS), stride=((1, 64 * ROWS), 64))
        return Shared(**self.tensors(storage, products, rows))

    def tensors(self, storage: Any, products: Products, ds_rows: cute.Layout) -> dict[str, cute.Tensor]:
        """Those of Shared by their names."""
        config = self.config
        layouts = products.layouts()
        bytes_of = {name: name if name in self.operands else name.removesuffix("_t") for name in layouts}
        operands = {
            name: getattr(storage, bytes_of[name]).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        }
        return operands | {
            "ds_rows": storage.ds.get_tensor(ds_rows, swizzle=layouts["ds"].inner),
            "lse2": storage.lse2.get_tensor(cute.make_layout((ROWS, config.q_stages))),
            "delta": storage.delta.get_tensor(cute.make_layout((ROWS, config.do_stages))),
            "dq": storage.dq.get_tensor(cute.make_layout((PIECE, 4, config.dq_stages))),
        }

    def pipes(self, storage: Any, shared: Shared, products: Products) -> Any:
        cluster = self.cluster.layout(products.scores)

        def ring(name: str) -> pipeline.PipelineTmaUmma:
            barriers = getattr(storage, f"{name}_bar").data_ptr()
            return operand_ring(barriers, getattr(shared, name), self.config.ctas, cluster)

        numbers = [f"{name}_{side}" for name in NUMBERS for side in STATISTICS]
        return self.pipes_kind(
            **{name: ring(name) for name in self.rings},
            **{name: getattr(storage, name).data_ptr() for name in (*self.barriers, *numbers)},
        )
