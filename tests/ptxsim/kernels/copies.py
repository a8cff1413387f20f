"""Asynchronous copies without tensor maps: cp.async, bulk copies and bulk reductions."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from torch import Tensor

from kernels.case import Case, generator
from kernels.launch import Grid, case, numbers, poison

WORDS = 512
"""4-byte words of a bulk copy."""


def _shared(words: int) -> tuple[cute.Tensor, Any]:
    """int32 [words] of shared memory, and a barrier."""
    allocator = SmemAllocator()
    barrier = allocator.allocate_array(Int64, 1)
    return allocator.allocate_tensor(Int32, cute.make_layout(words), byte_alignment=128), barrier


# --- cp.async -----------------------------------------------------------------------------------------------


@cute.jit
def cp_async(x: cute.Tensor, y: cute.Tensor) -> None:
    """Groups of 16, 8 and 4 bytes per thread, waited for one after another."""
    thread = cute.arch.thread_idx()[0]
    shared, _ = _shared(7 * 64)
    to, source = shared.iterator.toint(), x.iterator.toint()
    for begin, size in ((0, 16), (256, 8), (384, 4)):
        offset = begin * 4 + thread * size
        cache = "cg" if size == 16 else "ca"
        cute.arch.inline_ptx(
            f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size};",
            read_only_args=[to + offset, source + offset],
        )
        cute.arch.cp_async_commit_group()
    for left, begin, end in ((2, 0, 256), (1, 256, 384), (0, 384, 448)):
        cute.arch.cp_async_wait_group(left)
        cute.arch.sync_threads()
        for i in range_constexpr((end - begin) // 64):
            # what another thread's copy brought
            y[begin + 64 * i + 63 - thread] = shared[begin + 64 * i + 63 - thread]


@cute.jit
def cp_async_zeros(x: cute.Tensor, y: cute.Tensor) -> None:
    """Copies the first x[256 + thread] of each 16 bytes and zeroes the rest; then cp.async.wait_all."""
    thread = cute.arch.thread_idx()[0]
    shared, _ = _shared(256)
    offset = thread * 16
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared.iterator.toint() + offset, x.iterator.toint() + offset, x[256 + thread]],
    )
    cute.arch.inline_ptx("cp.async.wait_all;")
    cute.arch.sync_threads()
    for i in range_constexpr(4):
        y[64 * i + thread] = shared[64 * i + thread]


def _some_bytes() -> Tensor:
    return torch.cat([numbers(256)(), torch.randint(17, (64,), generator=generator(4)).int()])


def _zeros_expected(x: Tensor) -> Tensor:
    given = x[:256].view(torch.uint8).view(64, 16)
    kept = torch.arange(16) < x[256:, None]
    return torch.where(kept, given, 0).to(torch.uint8).view(-1).view(torch.int32)


@cute.jit
def cp_async_barrier(x: cute.Tensor, y: cute.Tensor) -> None:
    """Copies of one warp that another waits for at an mbarrier: 32 arrivals, made when copies have landed."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared, barrier = _shared(256)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 32)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        for i in range_constexpr(2):
            offset = (32 * i + thread) * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[shared.iterator.toint() + offset, x.iterator.toint() + offset],
            )
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
    else:
        cute.arch.mbarrier_wait(barrier, 0)
        for i in range_constexpr(8):
            y[32 * i + thread - 32] = shared[32 * i + thread - 32]


# --- bulk ---------------------------------------------------------------------------------------------------


@cute.jit
def bulk_copies(x: cute.Tensor, y: cute.Tensor) -> None:
    """Global to shared memory in two pieces on one barrier, each word plus one, and back in one piece."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared, barrier = _shared(WORDS)
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32, num_bits_per_copy=WORDS // 2 * 32)
    store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Int32, num_bits_per_copy=WORDS * 32)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, WORDS * 4)
            for i in range_constexpr(2):
                pieces = [cute.local_tile(tensor, (WORDS // 2,), (i,)) for tensor in (x, shared)]
                cute.copy(load, *pieces, mbar_ptr=barrier)
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(barrier, 0)
    for i in range(thread, WORDS, 64):
        shared[i] = shared[i] + 1
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if warp == 0:
        with cute.arch.elect_one():
            cute.copy(store, shared, y)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


REDUCED = {
    "add_f32": (Float32, torch.float32, "add.f32"),
    "add_f16": (Float16, torch.float16, "add.noftz.f16"),
    "add_bf16": (BFloat16, torch.bfloat16, "add.noftz.bf16"),
    "max_f16": (Float16, torch.float16, "max.f16"),
    "add_s32": (Int32, torch.int32, "add.s32"),
    "min_s32": (Int32, torch.int32, "min.s32"),
    "max_s32": (Int32, torch.int32, "max.s32"),
    "xor_b32": (Int32, torch.int32, "xor.b32"),
}


def bulk_reduction(opcode: str) -> Any:
    """Two CTAs, each of which reduces its row of x into y."""

    @cute.jit
    def body(x: cute.Tensor, y: cute.Tensor) -> None:
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, _ = _shared(WORDS)
        kind, count = x.element_type, WORDS * 32 // x.element_type.width
        elements = cute.make_tensor(cute.recast_ptr(shared.iterator, dtype=kind), cute.make_layout(count))
        for i in range(thread, count, 64):
            elements[i] = x[block, i]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.inline_ptx(
                    f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{opcode} "
                    "[{$r0}], [{$r1}], {$r2};",
                    read_only_args=[y.iterator.toint(), shared.iterator.toint(), Int32(WORDS * 4)],
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)

    return body


def _reduction_case(name: str) -> Case:
    _, dtype, opcode = REDUCED[name]
    count = WORDS * 4 // dtype.itemsize

    def elements(rows: int, seed: int) -> Tensor:
        """Whole numbers from -30 to 30 but zero."""
        drawn = torch.randint(1, 31, (rows, count), generator=generator(seed))
        return (drawn * (torch.randint(2, (rows, count), generator=generator(seed + 1)) * 2 - 1)).to(dtype)

    def expected(x: Tensor) -> Tensor:
        y = elements(1, 12)[0]
        for row in x:
            y = {"add": torch.add, "min": torch.minimum, "max": torch.maximum, "xor": torch.bitwise_xor}[
                opcode.split(".")[0]
            ](y, row)
        return y

    return case(
        bulk_reduction(opcode),
        lambda: elements(2, 10),
        lambda: elements(1, 12)[0],
        expected,
        Grid(64, blocks=2),
        name=f"bulk_{name}",
    )


CASES = (
    case(cp_async, numbers(448), poison(448), lambda x: x, Grid(64)),
    case(cp_async_zeros, _some_bytes, poison(256), _zeros_expected, Grid(64)),
    case(cp_async_barrier, numbers(256), poison(256), lambda x: x, Grid(64)),
    case(bulk_copies, numbers(WORDS), poison(WORDS), lambda x: x + 1, Grid(64)),
    *map(_reduction_case, REDUCED),
)
