"""The Blackwell backward kernel of pairs of CTAs: descriptors and launch on the host, and on the device the
split into roles. A pair has 256 keys, 128 per CTA; products span both.

load warp --[k, v, k_t once]----------------------> multiply warp <--(S, dP; P, dS)--> compute --> dk, dv
          --[q, q_t, dout, dout_t rings]----------> of the first       |   ^
          --[lse2, delta rings]-----------------------------------------+  |
                                (dQ)--> reduce --> dq_sum                   +--(dS)--> the other CTA
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4flex.codegen.kernels.bwd_sm100.config import COLUMNS, ROWS
from fa4flex.codegen.kernels.bwd_sm100.parts import Products
from fa4flex.codegen.kernels.bwd_sm100.reduce import PIECE
from fa4flex.codegen.kernels.bwd_sm100.roles import (
    ALLOCATED,
    COMPUTE,
    FINISHED,
    LOAD,
    MULTIPLY,
    READ_TENSOR_MEMORY,
    STATISTICS,
    TOUCH_TENSOR_MEMORY,
    WARPS,
)
from fa4flex.codegen.kernels.bwd_sm100_pair.compute import Compute
from fa4flex.codegen.kernels.bwd_sm100_pair.config import CTAS, KEPT, Config
from fa4flex.codegen.kernels.bwd_sm100_pair.load import Load, Transfers
from fa4flex.codegen.kernels.bwd_sm100_pair.multiply import Multiply
from fa4flex.codegen.kernels.bwd_sm100_pair.parts import Pipes, Shared
from fa4flex.codegen.kernels.bwd_sm100_pair.reduce import Reduce
from fa4flex.codegen.kernels.bwd_sm100_pair.roles import BARRIERS, RINGS
from fa4flex.codegen.kernels.common.backward import BackwardArguments, BackwardCourse
from fa4flex.codegen.kernels.common.cluster import Cluster
from fa4flex.codegen.kernels.common.hooks import Hooks
from fa4flex.codegen.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.codegen.kernels.common.transfer import reordered
from fa4flex.codegen.kernels.common.work import Grid


class Backward:
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "backward"
    """Which arguments it takes."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        cluster = self.cluster = Cluster(CTAS)
        course = self.course = BackwardCourse(config, hooks, CTAS)
        self.load = Load(config, course, cluster)
        self.multiply = Multiply(config, course, cluster)
        self.compute = Compute(config, hooks, course, cluster)
        self.reduce = Reduce(config, course, cluster)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream: cuda.CUstream) -> None:
        grid = self.course.grid(arguments)
        self.device(arguments, grid, self.transfers(arguments)).launch(
            grid=[grid.total * CTAS, 1, 1],
            block=[32 * WARPS, 1, 1],
            cluster=[CTAS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it the compiler drops the register split
        )

    def products(self, arguments: BackwardArguments) -> Products:
        return Products(self.config, arguments.q.element_type, self.cluster)

    def transfers(self, arguments: BackwardArguments) -> Transfers:
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
            tensor = getattr(arguments, name.removesuffix("_t"))
            modes = [3, 1, 2, 0] if name.endswith("_t") else [1, 3, 2, 0]
            return make(load, reordered(tensor, modes), layouts[name], tile, product, cluster)

        return Transfers(**{name: one(name) for name in Transfers._fields})

    def stages(self, name: str) -> int:
        return self.config.q_stages if name in ("q", "q_t", "lse2") else self.config.do_stages

    def storage(self, products: Products) -> Any:
        members: dict[str, Any] = dict.fromkeys(BARRIERS, cute.struct.MemRange[Int64, 1])
        members |= {f"{name}_bar": cute.struct.MemRange[Int64, 2 * self.stages(name)] for name in RINGS}
        numbers = ("lse2", "delta")
        for name in numbers:
            members |= {
                f"{name}_{side}": cute.struct.MemRange[Int64, self.stages(name)] for side in STATISTICS
            }
        members |= {"freed": Int64, "columns": Int32}
        for name in numbers:
            members[name] = cute.struct.Align[cute.struct.MemRange[Float32, ROWS * self.stages(name)], 128]
        for name, layout in products.layouts().items():
            # TMA swizzles by 1024 bytes.
            members[name] = cute.struct.Align[cute.struct.MemRange[products.kind, cute.cosize(layout)], 1024]
        size = PIECE * 4 * self.config.dq_stages
        members["dq"] = cute.struct.Align[cute.struct.MemRange[Float32, size], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(self, arguments: BackwardArguments, grid: Grid, transfers: Transfers) -> None:
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
        work = self.course.work(grid, arguments)
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
            for name, arrivals in BARRIERS.items():
                cute.arch.mbarrier_init(getattr(storage, name).data_ptr(), arrivals)
            for name in ("lse2", "delta"):
                for side, arrivals in STATISTICS.items():
                    for stage in range(self.stages(name)):
                        barrier = getattr(storage, f"{name}_{side}").data_ptr() + stage
                        cute.arch.mbarrier_init(barrier, arrivals)
        cute.arch.mbarrier_init_fence()

    def shared(self, storage: Any, products: Products) -> Shared:
        config = self.config
        layouts = products.layouts()
        operands = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        }
        # A key's queries lie next to each other, in a row of the swizzle.
        rows = cute.make_layout((KEPT, config.tile_n), stride=(1, KEPT))
        return Shared(
            **operands,
            ds_rows=storage.ds.get_tensor(rows, swizzle=layouts["ds"].inner),
            lse2=storage.lse2.get_tensor(cute.make_layout((ROWS, config.q_stages))),
            delta=storage.delta.get_tensor(cute.make_layout((ROWS, config.do_stages))),
            dq=storage.dq.get_tensor(cute.make_layout((PIECE, 4, config.dq_stages))),
            sent=storage.ds.data_ptr(),
        )

    def pipes(self, storage: Any, shared: Shared, products: Products) -> Pipes:
        cluster = self.cluster.layout(products.scores)

        def ring(name: str) -> pipeline.PipelineTmaUmma:
            barriers = getattr(storage, f"{name}_bar").data_ptr()
            return operand_ring(barriers, getattr(shared, name), CTAS, cluster)

        numbers = [f"{name}_{side}" for name in ("lse2", "delta") for side in STATISTICS]
        return Pipes(
            **{name: ring(name) for name in RINGS},
            **{name: getattr(storage, name).data_ptr() for name in (*BARRIERS, *numbers)},
        )
