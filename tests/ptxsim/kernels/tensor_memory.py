"""Tensor memory: stored in one shape and loaded in another, as the compiler lays lanes out; A of an MMA."""

from __future__ import annotations

import cutlass.utils.blackwell_helpers as sm100
import torch
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64, cute, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator

from kernels.case import Case, compile_for
from kernels.gemm_sm90 import integers
from kernels.launch import fake, numbers, poison

LANES, COLUMNS = 128, 64
SHAPES = {
    "32x32b": (tcgen05.St32x32bOp, tcgen05.Ld32x32bOp, 1),
    "16x64b": (tcgen05.St16x64bOp, tcgen05.Ld16x64bOp, 2),
    "16x128b": (tcgen05.St16x128bOp, tcgen05.Ld16x128bOp, 4),
    "16x256b": (tcgen05.St16x256bOp, tcgen05.Ld16x256bOp, 8),
    "16x32bx2": (tcgen05.St16x32bx2Op, tcgen05.Ld16x32bx2Op, 2),
}
"""Store, load, and columns of one repetition."""


class Exchange:
    """y = x [LANES, COLUMNS] by way of tensor memory: `store` and `load` are (shape, repetitions)."""

    def __init__(self, store: tuple[str, int], load: tuple[str, int]) -> None:
        self.store, self.load = store, load

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        self.device(x, y).launch(grid=[1, 1, 1], block=[LANES, 1, 1], stream=stream)

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor) -> None:
        lane = cute.arch.thread_idx()[0]
        memory = TmemAllocator(
            SmemAllocator().allocate_array(Int32, 1),
            barrier_for_retrieve=pipeline.NamedBarrier(1, LANES),
            allocator_warp_id=0,
        )
        memory.allocate(COLUMNS)
        memory.wait_for_alloc()
        start = memory.retrieve_ptr(Float32)
        whole = cute.make_tensor(start, cute.make_layout((LANES, COLUMNS), stride=(1 << 16, 1)))
        to_memory, from_memory = self.copy(self.store, 0, whole), self.copy(self.load, 1, whole)
        mine = to_memory.get_slice(lane)
        given = cute.make_rmem_tensor(mine.partition_S(x).shape, Float32)
        cute.autovec_copy(mine.partition_S(x), given)
        cute.copy(to_memory, given, mine.partition_D(whole))
        cute.arch.fence_view_async_tmem_store()
        mine = from_memory.get_slice(lane)
        found = cute.make_rmem_tensor(mine.partition_D(y).shape, Float32)
        cute.copy(from_memory, mine.partition_S(whole), found)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(found, mine.partition_D(y))
        memory.relinquish_alloc_permit()
        cute.arch.sync_threads()
        memory.free(start)

    def copy(self, shape: tuple[str, int], which: int, whole: cute.Tensor) -> cute.TiledCopy:
        name, repetitions = shape
        operation = SHAPES[name][which](tcgen05.Repetition(repetitions))
        return tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), whole)


def case(store: tuple[str, int], load: tuple[str, int]) -> Case:
    def words() -> torch.Tensor:
        """Any bits; fp32, so that nothing converts them."""
        return numbers(LANES, COLUMNS)().view(torch.float32)

    def empty() -> torch.Tensor:
        return poison(LANES, COLUMNS)().view(torch.float32)

    return Case(
        name=f"tensor_memory_{store[0]}_x{store[1]}_to_{load[0]}_x{load[1]}",
        archs=("sm_100a",),
        build=lambda arch: compile_for(arch, Exchange(store, load), fake(words()), fake(empty())),
        inputs=lambda: (words(),),
        outputs=lambda: (empty(),),
        expected=lambda x: (x.view(torch.int32),),
        decoded=lambda outputs: (outputs[0].view(torch.int32),),
    )


# --- A from tensor memory -----------------------------------------------------------------------------------


class Product:
    """C [128, n] fp32 = A [128, k] B [n, k]^T, both bf16: every thread brings its row of A to tensor memory,
    and all of them B to shared memory, from where one thread multiplies."""

    def __init__(self, columns: int, depth: int) -> None:
        self.tile = (LANES, columns, depth)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream) -> None:
        self.device(a, b, c).launch(grid=[1, 1, 1], block=[LANES, 1, 1], stream=stream)

    def product(self) -> cute.TiledMma:
        k, one = OperandMajorMode.K, tcgen05.CtaGroup.ONE
        source = tcgen05.OperandSource.TMEM
        return sm100.make_trivial_tiled_mma(
            BFloat16, BFloat16, k, k, Float32, one, self.tile[:2], a_source=source
        )

    @cute.kernel
    def device(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
        product, allocator = self.product(), SmemAllocator()
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        done = allocator.allocate_array(Int64, 1)
        layout = sm100.make_smem_layout_b(product, self.tile, BFloat16, 1)
        b_shared = allocator.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        memory = TmemAllocator(
            allocator.allocate_array(Int32, 1),
            barrier_for_retrieve=pipeline.NamedBarrier(1, LANES),
            allocator_warp_id=0,
        )
        if thread == 0:
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
        memory.allocate(2 * COLUMNS)
        memory.wait_for_alloc()
        start = memory.retrieve_ptr(Float32)
        self.fill(b_shared, b, thread)
        self.bring(a, start + COLUMNS, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
        cute.arch.sync_threads()
        sums = cute.make_tensor(
            start, product.make_fragment_C(product.partition_shape_C(self.tile[:2])).layout
        )
        if warp == 0:
            cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
            self.multiply(product, start + COLUMNS, b_shared, sums)
            with cute.arch.elect_one():
                tcgen05.commit(done)
        cute.arch.mbarrier_wait(done, 0)
        cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
        self.keep(sums[(None, None), 0, 0], c, thread)
        memory.relinquish_alloc_permit()
        cute.arch.sync_threads()
        memory.free(start)

    @cute.jit
    def fill(self, shared: cute.Tensor, b: cute.Tensor, thread: Int32) -> None:
        _, columns, depth = self.tile
        for i in range(thread, columns * depth, LANES):
            n, k = i // depth, i % depth
            shared[(n, k % 16), 0, k // 16, 0] = b[n, k]

    @cute.jit
    def bring(self, a: cute.Tensor, start: cute.Pointer, thread: Int32) -> None:
        """Stores a thread's row of A in tensor memory, two elements to a column."""
        words = cute.make_tensor(start, cute.make_layout((LANES, self.tile[2] // 2), stride=(1 << 16, 1)))
        pairs = cute.recast_tensor(a, Float32)
        operation = tcgen05.St32x32bOp(tcgen05.Repetition(self.tile[2] // 2))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), words)
        mine = copy.get_slice(thread)
        given = cute.make_rmem_tensor(mine.partition_S(pairs).shape, Float32)
        cute.autovec_copy(mine.partition_S(pairs), given)
        cute.copy(copy, given, mine.partition_D(words))
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def multiply(
        self, product: cute.TiledMma, start: cute.Pointer, shared: cute.Tensor, sums: cute.Tensor
    ) -> None:
        atom = cute.make_mma_atom(product.op)
        # Fragments made for tensor memory begin at column 0, wherever the tensor lies; two elements a column.
        like = product.make_fragment_A(sm100.make_smem_layout_a(product, self.tile, BFloat16, 1).outer.shape)
        a = cute.make_tensor(like.iterator + 2 * start.toint(), like.layout)
        b = product.make_fragment_B(shared)
        for step in range_constexpr(self.tile[2] // 16):
            atom.set(tcgen05.Field.ACCUMULATE, step > 0)
            cute.gemm(atom, sums, a[None, None, step, 0], b[None, None, step, 0], sums)

    @cute.jit
    def keep(self, sums: cute.Tensor, c: cute.Tensor, thread: Int32) -> None:
        operation = tcgen05.Ld32x32bOp(tcgen05.Repetition(self.tile[1]))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), sums)
        mine = copy.get_slice(thread)
        found = cute.make_rmem_tensor(mine.partition_D(c).shape, Float32)
        cute.copy(copy, mine.partition_S(sums), found)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(found, mine.partition_D(c))


def product_case(columns: int, depth: int) -> Case:
    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(integers((rows, depth), "k", torch.bfloat16, rows) for rows in (LANES, columns))  # type: ignore[return-value]

    def outputs() -> tuple[torch.Tensor]:
        return (torch.full((LANES, columns), torch.nan),)

    return Case(
        name=f"tensor_memory_product_n{columns}_k{depth}",
        archs=("sm_100a",),
        build=lambda arch: compile_for(arch, Product(columns, depth), *map(fake, (*inputs(), *outputs()))),
        inputs=inputs,
        outputs=outputs,
        expected=lambda a, b: (a.float() @ b.float().T,),
    )


CASES = (
    case(("32x32b", 64), ("32x32b", 1)),
    case(("32x32b", 32), ("32x32b", 16)),
    case(("32x32b", 32), ("16x64b", 8)),
    case(("32x32b", 32), ("16x128b", 4)),
    case(("32x32b", 32), ("16x256b", 8)),
    case(("16x64b", 4), ("32x32b", 32)),
    case(("16x128b", 16), ("32x32b", 64)),
    case(("16x256b", 2), ("32x32b", 8)),
    case(("16x256b", 4), ("16x128b", 1)),
    product_case(64, 64),
    product_case(32, 32),
)
