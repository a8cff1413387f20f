"""The Blackwell backward kernel: descriptors and launch on the host, and on the device the split into roles.

load warp --[k, v once; q, dout rings]--> multiply warp <--(S, dP; P, dS)--> compute warpgroups --> dk, dv
          --[lse2, delta rings]--------------------+---------------------------------^
                                                   +--(dQ)--> reduce warpgroup --> dq_sum
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa4flex.codegen.kernels.bwd_sm100.compute import Compute
from fa4flex.codegen.kernels.bwd_sm100.config import COLUMNS, ROWS, Config
from fa4flex.codegen.kernels.bwd_sm100.load import Load, Transfers
from fa4flex.codegen.kernels.bwd_sm100.multiply import Multiply
from fa4flex.codegen.kernels.bwd_sm100.parts import Pipes, Products, Shared
from fa4flex.codegen.kernels.bwd_sm100.reduce import PIECE, Reduce
from fa4flex.codegen.kernels.bwd_sm100.roles import (
    ALLOCATED,
    BARRIERS,
    COMPUTE,
    FINISHED,
    LOAD,
    MULTIPLY,
    READ_TENSOR_MEMORY,
    STATISTICS,
    TOUCH_TENSOR_MEMORY,
    WARPS,
)
from fa4flex.codegen.kernels.common.backward import BackwardArguments, BackwardCourse
from fa4flex.codegen.kernels.common.cluster import Cluster
from fa4flex.codegen.kernels.common.hooks import Hooks
from fa4flex.codegen.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.codegen.kernels.common.transfer import ending, reordered
from fa4flex.codegen.kernels.common.work import Grid


class Backward:
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "backward"
    """Which arguments it takes."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        cluster = self.cluster = Cluster(config.ctas)
        course = self.course = BackwardCourse(config, hooks, config.ctas)
        self.load = Load(config, course, cluster)
        self.multiply = Multiply(config, course, cluster)
        self.compute = Compute(config, hooks, course, cluster)
        self.reduce = Reduce(config, course, cluster)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream: cuda.CUstream) -> None:
        grid = self.course.grid(arguments)
        self.device(arguments, grid, self.transfers(arguments)).launch(
            grid=[grid.total, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it the compiler drops the register split
        )

    def products(self, arguments: BackwardArguments) -> Products:
        return Products(self.config, arguments.q.element_type, self.cluster)

    def transfers(self, arguments: BackwardArguments) -> Transfers:
        products = self.products(arguments)
        layouts = {name: cute.select(x, mode=[0, 1, 2]) for name, x in products.layouts().items()}
        load = cpasync.CopyBulkTensorTileG2SOp()
        scores, dprob = (products.scores_tile, products.scores), (products.dprob_tile, products.dprob)
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (products.scores.thr_id.shape,)).shape

        def rows(tensor: cute.Tensor) -> cute.Tensor:
            whole = reordered(tensor, [1, 3, 2, 0] if cute.rank(tensor) == 4 else [0, 2, 1])
            return ending(whole) if self.config.ragged else whole

        first, second = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        return Transfers(
            second(load, rows(arguments.q), layouts["q"], *scores, cluster),
            first(load, rows(arguments.k), layouts["k"], *scores, cluster),
            first(load, rows(arguments.v), layouts["v"], *dprob, cluster),
            second(load, rows(arguments.dout), layouts["dout"], *dprob, cluster),
        )

    def storage(self, products: Products) -> Any:
        config = self.config
        stages = {"q": config.q_stages, "do": config.do_stages}
        members: dict[str, Any] = dict.fromkeys(BARRIERS, cute.struct.MemRange[Int64, 1])
        members |= {f"{name}_bar": cute.struct.MemRange[Int64, 2 * count] for name, count in stages.items()}
        for name, count in (("lse2", config.q_stages), ("delta", config.do_stages)):
            members |= {f"{name}_{side}": cute.struct.MemRange[Int64, count] for side in STATISTICS}
        members |= {"freed": Int64, "columns": Int32}
        for name, count in (("lse2", config.q_stages), ("delta", config.do_stages)):
            members[name] = cute.struct.Align[cute.struct.MemRange[Float32, ROWS * count], 128]
        layouts = products.layouts()
        for name in ("q", "k", "v", "dout", "ds"):
            size = cute.cosize(layouts[name])
            # TMA swizzles by 1024 bytes.
            members[name] = cute.struct.Align[cute.struct.MemRange[products.kind, size], 1024]
        members["dq"] = cute.struct.Align[cute.struct.MemRange[Float32, PIECE * 4 * config.dq_stages], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(self, arguments: BackwardArguments, grid: Grid, transfers: Transfers) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        registers = self.config.registers
        products = self.products(arguments)
        storage = SmemAllocator().allocate(self.storage(products))
        shared = self.shared(storage, products)
        pipes = self.pipes(storage, shared)
        allocated = pipeline.NamedBarrier(ALLOCATED, TOUCH_TENSOR_MEMORY)
        memory = tensor_memory(storage, COMPUTE, allocated, self.config.ctas)
        if warp == LOAD:
            for transfer in transfers:
                cpasync.prefetch_descriptor(transfer.atom)
        if warp == 0:
            self.initialise(storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
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

    def initialise(self, storage: Any) -> None:
        config = self.config
        with cute.arch.elect_one():
            for name, arrivals in BARRIERS.items():
                cute.arch.mbarrier_init(getattr(storage, name).data_ptr(), arrivals)
            for name, stages in (("lse2", config.q_stages), ("delta", config.do_stages)):
                for side, arrivals in STATISTICS.items():
                    for stage in range(stages):
                        barrier = getattr(storage, f"{name}_{side}").data_ptr() + stage
                        cute.arch.mbarrier_init(barrier, arrivals)
        cute.arch.mbarrier_init_fence()

    def shared(self, storage: Any, products: Products) -> Shared:
        config = self.config
        layouts = products.layouts()
        members = {name: name.removesuffix("_t") for name in layouts}
        operands = {
            name: getattr(storage, members[name]).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        }
        # A key's queries lie next to each other, 64 of them in a row of the swizzle.
        rows = cute.make_layout(((64, ROWS // 64), ROWS), stride=((1, 64 * ROWS), 64))
        return Shared(
            **operands,
            ds_rows=storage.ds.get_tensor(rows, swizzle=layouts["ds"].inner),
            lse2=storage.lse2.get_tensor(cute.make_layout((ROWS, config.q_stages))),
            delta=storage.delta.get_tensor(cute.make_layout((ROWS, config.do_stages))),
            dq=storage.dq.get_tensor(cute.make_layout((PIECE, 4, config.dq_stages))),
        )

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        numbers = [f"{name}_{side}" for name in ("lse2", "delta") for side in STATISTICS]
        return Pipes(
            operand_ring(storage.q_bar.data_ptr(), shared.q),
            operand_ring(storage.do_bar.data_ptr(), shared.dout),
            **{name: getattr(storage, name).data_ptr() for name in (*BARRIERS, *numbers)},
        )
