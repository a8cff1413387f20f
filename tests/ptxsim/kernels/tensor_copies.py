"""tcgen05.cp: from shared memory, by a descriptor without swizzle, to tensor memory."""

from __future__ import annotations

import torch
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from torch import Tensor

from kernels.case import Case
from kernels.launch import Grid, case, numbers, poison

LANES = 128
SHAPES = {
    "128x256b": (128, 8, (0, 1, 2, 3)),
    "128x128b": (128, 4, (0, 1, 2, 3)),
    "64x128b.warpx2::02_13": (64, 4, (0, 1, 0, 1)),
    "64x128b.warpx2::01_23": (64, 4, (0, 0, 1, 1)),
    "32x128b.warpx4": (32, 4, (0, 0, 0, 0)),
}
"""Rows, 4-byte words of a row, and which 32 rows each warp's lanes get. PTX ISA, "Data Movement Shape"."""


def copied(shape: str, rows: int, words: int) -> object:
    """A body that copies x int32 [rows, words] and writes what all lanes have then to y [LANES, words]."""
    # 8 rows of 16 bytes are a block; blocks lie one after another along rows, and then along words.
    along_rows, along_words = 128, rows * 16
    constant = (along_words >> 4) << 16 | (along_rows >> 4) << 32 | 1 << 46

    @cute.jit
    def body(x: cute.Tensor, y: cute.Tensor) -> None:
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        done, holder = allocator.allocate_array(Int64, 1), allocator.allocate_array(Int32, 1)
        shared = allocator.allocate_tensor(Int32, cute.make_layout(rows * words), byte_alignment=1024)
        memory = TmemAllocator(
            holder, barrier_for_retrieve=pipeline.NamedBarrier(1, LANES), allocator_warp_id=0
        )
        if thread == 0:
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
        memory.allocate(32)
        memory.wait_for_alloc()
        start = memory.retrieve_ptr(Float32)
        for i in range(thread, rows * words, LANES):
            row, word = i // words, i % words
            shared[row * 4 + word // 4 * rows * 4 + word % 4] = x[row, word]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                descriptor = Int64(shared.iterator.toint() >> 4) | constant
                cute.arch.inline_ptx(
                    f"tcgen05.cp.cta_group::1.{shape} [{{$r0}}], {{$r1}};",
                    read_only_args=[start.toint(), descriptor],
                )
                tcgen05.commit(done)
        cute.arch.mbarrier_wait(done, 0)
        cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
        whole = cute.make_tensor(start, cute.make_layout((LANES, words), stride=(1 << 16, 1)))
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(words)), Float32)
        copy = tcgen05.make_tmem_copy(atom, whole)
        mine, to = copy.get_slice(thread), cute.recast_tensor(y, Float32)
        found = cute.make_rmem_tensor(mine.partition_D(to).shape, Float32)
        cute.copy(copy, mine.partition_S(whole), found)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(found, mine.partition_D(to))
        memory.relinquish_alloc_permit()
        cute.arch.sync_threads()
        memory.free(start)

    return body


def copy_case(shape: str) -> Case:
    rows, words, parts = SHAPES[shape]

    def expected(x: Tensor) -> Tensor:
        return torch.cat([x[32 * part : 32 * part + 32] for part in parts])

    return case(
        copied(shape, rows, words),  # type: ignore[arg-type]
        numbers(rows, words),
        poison(LANES, words),
        expected,
        Grid(LANES),
        archs=("sm_100a",),
        name=f"tensor_copy_{shape.replace('.', '_').replace('::', '_')}",
    )


CASES = tuple(map(copy_case, SHAPES))
