"""Clusters of two CTAs: multicast, distributed shared memory, remote barriers, copies between the CTAs."""

from __future__ import annotations

import torch
from cuda.bindings import driver as cuda
from cutlass import Int16, Int32, Int64, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from torch import Tensor

from kernels.case import BOTH, Case, compile_for
from kernels.launch import Grid, case, fake, numbers, poison
from kernels.tma import swizzled

ROWS, COLUMNS = 16, 32
"""Shape of an int32 tile, whose rows have 128 bytes."""
PAIR = Grid(64, blocks=2, cluster=2)


class Multicast:
    """Each CTA loads half the rows of a tile and multicasts them to both; both write their shared memory."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        moved = cpasync.make_tiled_tma_atom(load, x, self.layout(), (ROWS, COLUMNS), num_multicast=2)
        self.device(moved, y).launch(grid=[2, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1], stream=stream)

    def layout(self) -> cute.ComposedLayout:
        plain = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)

    @cute.kernel
    def device(self, moved: cpasync.TmaInfo, y: cute.Tensor) -> None:
        allocator, layout = SmemAllocator(), self.layout()
        landed = allocator.allocate_array(Int64, 1)
        words = allocator.allocate_tensor(Int32, cute.make_layout(ROWS * COLUMNS), byte_alignment=1024)
        tile = cute.make_tensor(cute.recast_ptr(words.iterator, layout.inner), layout.outer)
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(landed, 1)
                cute.arch.mbarrier_arrive_and_expect_tx(landed, ROWS * COLUMNS * 4)
            cute.arch.mbarrier_init_fence()
        # neither CTA may write to the other before that one's barrier exists
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        to, source = cpasync.tma_partition(
            moved.atom,
            rank,
            cute.make_layout(2),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(cute.local_tile(moved.tma_tensor, (ROWS, COLUMNS), (0, 0)), 0, 2),
        )
        if warp == 0:
            cute.copy(moved.atom, source, to, tma_bar_ptr=landed, mcast_mask=Int16(3))
        cute.arch.mbarrier_wait(landed, 0)
        for i in range(thread, ROWS * COLUMNS, 64):
            y[rank, i] = words[i]
        # nor leave while the other still writes here
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def _multicast_case() -> Case:
    x, y = numbers(ROWS, COLUMNS), poison(2, ROWS * COLUMNS)

    def expected(x: Tensor) -> tuple[Tensor]:
        image = swizzled(x.reshape(-1), 128)
        return (torch.stack([image, image]),)

    return Case(
        name="multicast",
        archs=BOTH,
        build=lambda arch: compile_for(arch, Multicast(), fake(x()), fake(y())),
        inputs=lambda: (x(),),
        outputs=lambda: (y(),),
        expected=expected,
    )


# --- distributed shared memory ------------------------------------------------------------------------------


def _place() -> tuple[Int32, Int32, Int32]:
    """(thread, rank, the other CTA's rank)"""
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return cute.arch.thread_idx()[0], rank, rank ^ 1


@cute.jit
def remote_stores(x: cute.Tensor, y: cute.Tensor) -> None:
    """Words stored to the other CTA, then a remote arrival on its barrier; and words read from it."""
    thread, rank, other = _place()
    allocator = SmemAllocator()
    filled = allocator.allocate_array(Int64, 1)
    shared = allocator.allocate_tensor(Int32, cute.make_layout(128), byte_alignment=128)
    if thread == 0:
        cute.arch.mbarrier_init(filled, 64)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    remote = cute.arch.map_dsmem_ptr(shared.iterator, other) + thread
    cute.arch.inline_ptx(
        "st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[remote.toint(), x[rank, thread]]
    )
    cute.arch.inline_ptx(
        "{ .reg .b32 far; mapa.shared::cluster.u32 far, {$r0}, {$r1}; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [far]; }",
        read_only_args=[filled.toint(), other],
    )
    cute.arch.inline_ptx(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], 0; "
        "@!p bra again; }",
        read_only_args=[filled.toint()],
    )
    shared[64 + thread] = shared[63 - thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    y[rank, 0, thread] = shared[thread]
    y[rank, 1, thread] = cute.arch.inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0} + 256];",
        write_only_types=[Int32],
        read_only_args=[remote.toint()],
    )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def _stores_expected(x: Tensor) -> Tensor:
    """A CTA holds the other's row, and reads its own reversed."""
    return torch.stack([x.flip(0), x.flip(1)], 1)


@cute.jit
def asynchronous_stores(x: cute.Tensor, y: cute.Tensor) -> None:
    """st.async of 4, 8 and 16 bytes per thread to the other CTA, whose barrier counts the bytes."""
    thread, rank, other = _place()
    allocator = SmemAllocator()
    filled = allocator.allocate_array(Int64, 1)
    shared = allocator.allocate_tensor(Int32, cute.make_layout(7 * 64), byte_alignment=128)
    if thread == 0:
        cute.arch.mbarrier_init(filled, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(filled, 7 * 64 * 4)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for begin, size in ((0, 4), (256, 2), (384, 1)):
        start = begin + thread * size
        to = (shared.iterator + start).align(4 * size)
        found = tuple(x[rank, start + j] for j in range(size))
        cute.arch.store_async_dsmem(to, found if size > 1 else found[0], filled, other)
    cute.arch.mbarrier_wait(filled, 0)
    for i in range_constexpr(7):
        y[rank, 64 * i + thread] = shared[64 * i + thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def bulk_to_other(x: cute.Tensor, y: cute.Tensor) -> None:
    """A bulk copy from shared memory to the other CTA's, whose barrier counts the bytes."""
    thread, rank, other = _place()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = SmemAllocator()
    filled = allocator.allocate_array(Int64, 1)
    shared = allocator.allocate_tensor(Int32, cute.make_layout((2, 256), stride=(256, 1)), byte_alignment=128)
    if thread == 0:
        cute.arch.mbarrier_init(filled, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(filled, 1024)
    cute.arch.mbarrier_init_fence()
    for i in range_constexpr(4):
        shared[0, 64 * i + thread] = x[rank, 64 * i + thread]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, {$r0}, {$r3}; "
                "mapa.shared::cluster.u32 bar, {$r2}, {$r3}; "
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[to], [{$r1}], 1024, [bar]; }",
                read_only_args=[
                    (shared.iterator + 256).toint(),
                    shared.iterator.toint(),
                    filled.toint(),
                    other,
                ],
            )
    cute.arch.mbarrier_wait(filled, 0)
    for i in range_constexpr(4):
        y[rank, 64 * i + thread] = shared[1, 64 * i + thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def remote_atomics(x: cute.Tensor, y: cute.Tensor) -> None:
    """All threads of both CTAs add to 8 words of CTA 0."""
    thread, rank, _ = _place()
    shared = SmemAllocator().allocate_tensor(Int32, cute.make_layout(8), byte_alignment=128)
    if thread < 8:
        shared[thread] = 0
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    word = cute.arch.map_dsmem_ptr(shared.iterator + thread % 8, Int32(0))
    cute.arch.inline_ptx(
        "red.relaxed.cluster.shared::cluster.add.u32 [{$r0}], {$r1};",
        read_only_args=[word.toint(), x[rank, thread]],
    )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if rank == 0 and thread < 8:
        y[thread] = shared[thread]


CASES = (
    _multicast_case(),
    case(remote_stores, numbers(2, 64), poison(2, 2, 64), _stores_expected, PAIR),
    case(asynchronous_stores, numbers(2, 7 * 64), poison(2, 7 * 64), lambda x: x.flip(0), PAIR),
    case(bulk_to_other, numbers(2, 256), poison(2, 256), lambda x: x.flip(0), PAIR),
    case(remote_atomics, numbers(2, 64), poison(8), lambda x: x.view(-1, 8).sum(0).int(), PAIR),
)
