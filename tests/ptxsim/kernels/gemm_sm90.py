"""C [M, N] = A [M, K] B [N, K]^T on Hopper: a TMA warp feeds warpgroups that multiply by wgmma.

TMA warp --[ring of (A, B) tiles]--> warpgroups --(stmatrix, TMA store)--> C
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
import torch
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from torch import Tensor

from kernels.case import Case, Compiled, compile_for, generator

TYPES = {
    "bf16": (cutlass.BFloat16, torch.bfloat16),
    "f16": (cutlass.Float16, torch.float16),
    "e4m3": (cutlass.Float8E4M3FN, torch.float8_e4m3fn),
    "e5m2": (cutlass.Float8E5M2, torch.float8_e5m2),
}


def stored_as(kind: str) -> str:
    """C's kind for that of A and B: 8-bit products are stored in bf16."""
    return "bf16" if kind.startswith("e") else kind


@dataclass(frozen=True)
class Config:
    """`tile` is (m, n, k) of a CTA; a 64 x n product per warpgroup. A tile's rows of 128, 64 or 32 bytes
    along the operand's contiguous mode ("k", or "mn") are swizzled as such. With `share_b`, clusters of two
    CTAs load half of each B tile and multicast it."""

    kind: str = "bf16"
    tile: tuple[int, int, int] = (128, 128, 64)
    stages: int = 2
    a_major: str = "k"
    b_major: str = "k"
    a_in_registers: bool = False
    share_b: bool = False

    @property
    def warpgroups(self) -> int:
        return self.tile[0] // 64

    @property
    def store_columns(self) -> int:
        """Columns of one TMA store: a row of its swizzle."""
        return math.gcd(self.tile[1], 64)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (2 if self.share_b else 1, 1, 1)


class Gemm:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.kind = TYPES[config.kind][0]
        self.kept = TYPES[stored_as(config.kind)][0]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream) -> None:
        m, n, k = self.config.tile
        layouts = self.layouts()
        one_a, one_b, one_c = (cute.select(layout, mode=[0, 1]) for layout in layouts)
        load = cpasync.CopyBulkTensorTileG2SOp()
        half = 2 if self.config.share_b else 1
        load_b = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.config.share_b else load
        transfers = (
            cpasync.make_tiled_tma_atom(load, a, one_a, (m, k)),
            cpasync.make_tiled_tma_atom(load_b, b, one_b, (n, k), num_multicast=half),
            cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(), c, one_c, (m, self.config.store_columns)
            ),
        )
        blocks_m = cute.round_up(cute.ceil_div(c.shape[0], m), self.config.cluster[0])
        self.device(*transfers, self.product()).launch(
            grid=[blocks_m, cute.ceil_div(c.shape[1], n), 1],
            block=[128 * (1 + self.config.warpgroups), 1, 1],
            cluster=self.config.cluster,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def product(self) -> cute.TiledMma:
        major = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
        source = warpgroup.OperandSource
        return sm90.make_trivial_tiled_mma(
            self.kind,
            self.kind,
            major[self.config.a_major],
            major[self.config.b_major],
            Float32,
            atom_layout_mnk=(self.config.warpgroups, 1, 1),
            tiler_mn=(64, self.config.tile[1]),
            a_source=source.RMEM if self.config.a_in_registers else source.SMEM,
        )

    def layouts(self) -> tuple[Any, Any, Any]:
        """Swizzled: A (m, k, stage), B (n, k, stage), C (m, store_columns, their number)."""
        order = {"k": LayoutEnum.ROW_MAJOR, "mn": LayoutEnum.COL_MAJOR}
        config = self.config
        m, n, _ = config.tile
        columns = config.store_columns
        return (
            sm90.make_smem_layout_a(order[config.a_major], config.tile, self.kind, config.stages),
            sm90.make_smem_layout_b(order[config.b_major], config.tile, self.kind, config.stages),
            sm90.make_smem_layout_epi(self.kept, LayoutEnum.ROW_MAJOR, (m, columns), n // columns),
        )

    def storage(self, layouts: tuple[Any, ...]) -> Any:
        members = {"ring": cute.struct.MemRange[Int64, self.config.stages * 2]}
        for name, kind, layout in zip("abc", (self.kind, self.kind, self.kept), layouts):
            members[name] = cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(layout)], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        c: cpasync.TmaInfo,
        product: cute.TiledMma,
    ) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        layouts = self.layouts()
        storage = SmemAllocator().allocate(self.storage(layouts))
        shared = tuple(
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip((storage.a, storage.b, storage.c), layouts)
        )
        ring = self.ring(storage, shared)
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.config.cluster[:2], is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.config.cluster[:2])
        count = cute.ceil_div(a.tma_tensor.shape[1], self.config.tile[2])
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(40)
            if warp_index == 0:
                self.load((a, b), shared, ring, count)
        else:
            cute.arch.setmaxregister_increase(232)
            lane = cute.arch.thread_idx()[0] - 128
            sums = self.multiply(shared, ring, product, count, lane)
            self.store(c, shared[2], product, sums, lane)

    def ring(self, storage: Any, shared: tuple[cute.Tensor, ...]) -> pipeline.PipelineTmaAsync:
        thread = pipeline.Agent.Thread
        sizes = [cute.size_in_bytes(x.element_type, cute.select(x.layout, mode=[0, 1])) for x in shared[:2]]
        readers = self.config.warpgroups * 4 * self.config.cluster[0]
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.config.stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, readers),
            tx_count=sum(sizes),
            barrier_storage=storage.ring.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, *self.config.cluster)),
            mcast_mode_mn=(0, 1) if self.config.share_b else (1, 1),
            defer_sync=True,
        )

    @cute.jit
    def load(
        self,
        transfers: cutlass.Constexpr[tuple],  # type: ignore[type-arg]
        shared: cutlass.Constexpr[tuple],  # type: ignore[type-arg]
        ring: cutlass.Constexpr[pipeline.PipelineTmaAsync],
        count: Int32,
    ) -> None:
        m, n, k = self.config.tile
        (a, b), (block_m, block_n, _) = transfers, cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        a_tiles = cute.local_tile(a.tma_tensor, (m, k), (block_m, None))
        b_tiles = cute.local_tile(b.tma_tensor, (n, k), (block_n, None))
        a_to, a_from = _partition(a, shared[0], a_tiles)
        mask = None
        if const_expr(self.config.share_b):
            b_to, b_from = _partition(b, shared[1], b_tiles, rank, 2)
            mask = cutlass.Int16(3)
        else:
            b_to, b_from = _partition(b, shared[1], b_tiles)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        for tile in cutlass.range(count, unroll=1):
            ring.producer_acquire(state)
            full, stage = ring.producer_get_barrier(state), state.index
            cute.copy(a.atom, a_from[None, tile], a_to[None, stage], tma_bar_ptr=full)
            cute.copy(b.atom, b_from[None, tile], b_to[None, stage], tma_bar_ptr=full, mcast_mask=mask)
            state.advance()
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        shared: cutlass.Constexpr[tuple],  # type: ignore[type-arg]
        ring: cutlass.Constexpr[pipeline.PipelineTmaAsync],
        product: cutlass.Constexpr[cute.TiledMma],
        count: Int32,
        lane: Int32,
    ) -> cute.Tensor:
        m, n, k = self.config.tile
        mine = product.get_slice(lane)
        atom = cute.make_mma_atom(product.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        b = product.make_fragment_B(mine.partition_B(shared[1]))
        if const_expr(self.config.a_in_registers):
            a = product.make_fragment_A(product.partition_shape_A((m, k)))
        else:
            a = product.make_fragment_A(mine.partition_A(shared[0]))
        sums = cute.make_rmem_tensor(mine.partition_shape_C((m, n)), Float32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        for _ in cutlass.range(count, unroll=1):
            ring.consumer_wait(state)
            if const_expr(self.config.a_in_registers):
                self.to_registers(shared[0][None, None, state.index], a, product, lane)
            warpgroup.fence()
            for step in cutlass.range_constexpr(cute.size(b, mode=[2])):
                if const_expr(self.config.a_in_registers):
                    a_step = a[None, None, step]
                else:
                    a_step = a[None, None, step, state.index]
                cute.gemm(atom, sums, a_step, b[None, None, step, state.index], sums)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            ring.consumer_release(state)
            state.advance()
        return sums

    @cute.jit
    def to_registers(
        self,
        shared: cute.Tensor,
        fragment: cutlass.Constexpr[cute.Tensor],
        product: cutlass.Constexpr[cute.TiledMma],
        lane: Int32,
    ) -> None:
        """One stage of A by ldmatrix."""
        atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(self.config.a_major == "mn", 4), shared.element_type
        )
        copy = cute.make_tiled_copy_A(atom, product).get_slice(lane)
        cute.copy(copy, copy.partition_S(shared), copy.retile(fragment))

    @cute.jit
    def store(
        self,
        c: cutlass.Constexpr[cpasync.TmaInfo],
        shared: cute.Tensor,
        product: cutlass.Constexpr[cute.TiledMma],
        sums: cute.Tensor,
        lane: Int32,
    ) -> None:
        m, n, _ = self.config.tile
        kind = shared.element_type
        narrow = cute.make_rmem_tensor_like(sums, kind)
        narrow.store(sums.load().to(kind))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), kind)
        copy = cute.make_tiled_copy_C(atom, product).get_slice(lane)
        cute.copy(copy, copy.retile(narrow), copy.partition_D(cute.group_modes(shared, 1, 3)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1, number_of_threads=128 * self.config.warpgroups)
        if cute.arch.make_warp_uniform(lane // 32) == 0:
            block_m, block_n, _ = cute.arch.block_idx()
            block = cute.local_tile(c.tma_tensor, (m, n), (block_m, block_n))
            columns = cute.flat_divide(block, (m, self.config.store_columns))[None, None, 0, None]
            start, end = _partition(c, shared, columns)
            for column in cutlass.range_constexpr(cute.size(columns, mode=[2])):
                cute.copy(c.atom, start[None, column], end[None, column])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def _partition(
    transfer: cpasync.TmaInfo, shared: cute.Tensor, tiles: cute.Tensor, rank: Any = 0, ranks: int = 1
) -> tuple[cute.Tensor, cute.Tensor]:
    """(shared, global) views of what a transfer moves, whose last mode counts stages and tiles; of `ranks`
    multicasting CTAs the `rank`th moves its part."""
    grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    return cpasync.tma_partition(transfer.atom, rank, cute.make_layout(ranks), *grouped)


def build(arch: str, config: Config) -> Compiled:
    """Called as (a [M, K], b [N, K], c [M, N]), each with the stride 1 that its major says."""
    return compile_for(arch, Gemm(config), *operands(config))


def operands(config: Any) -> tuple[Any, Any, Any]:
    """A, B and C as the compiler is told about them."""
    m, n, k = (cute.sym_int32() for _ in range(3))
    kind, kept = config.kind, stored_as(config.kind)
    given = (kind, (m, k), config.a_major), (kind, (n, k), config.b_major), (kept, (m, n), "k")
    return tuple(_fake(TYPES[name][0], shape, major) for name, shape, major in given)


def _fake(kind: Any, shape: tuple[Any, Any], major: str) -> Any:
    long = cute.sym_int64(divisibility=128 // kind.width)
    strides = (long, 1) if major == "k" else (1, long)
    return make_fake_tensor(kind, shape, strides, assumed_align=16)


def expected(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    kept = a.dtype if a.dtype.itemsize == 2 else torch.bfloat16
    return ((a.double() @ b.double().T).to(kept),)


def integers(shape: tuple[int, int], major: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Whole numbers from -4 to 4 but zero, whose products add up to the same fp32 number in any order."""
    if major == "mn":
        return integers((shape[1], shape[0]), "k", dtype, seed).T
    signs = torch.randint(2, shape, generator=generator(seed + 1)) * 2 - 1
    return (torch.randint(1, 5, shape, generator=generator(seed)) * signs).to(dtype)


def case(name: str, config: Config, shape: tuple[int, int, int]) -> Case:
    """`shape` is (M, N, K)."""
    m, n, k = shape
    dtype = TYPES[config.kind][1]
    return Case(
        name=name,
        archs=("sm_90a",),
        build=lambda arch: build(arch, config),
        inputs=lambda: (
            integers((m, k), config.a_major, dtype, 1),
            integers((n, k), config.b_major, dtype, 5),
        ),
        outputs=lambda: (torch.full((m, n), torch.nan, dtype=TYPES[stored_as(config.kind)][1]),),
        expected=expected,
    )


CASES = (
    case("gemm_sm90", Config(), (128, 128, 192)),
    case("gemm_sm90_edges", Config(), (200, 136, 168)),
    case("gemm_sm90_f16_64b", Config("f16", tile=(64, 64, 32), stages=3), (128, 64, 160)),
    case("gemm_sm90_32b", Config(tile=(64, 128, 16)), (64, 128, 48)),
    case("gemm_sm90_b_mn", Config(b_major="mn"), (128, 128, 128)),
    case("gemm_sm90_a_mn_b_mn_64b", Config(tile=(64, 96, 64), a_major="mn", b_major="mn"), (64, 96, 128)),
    case("gemm_sm90_registers", Config(a_in_registers=True), (128, 128, 128)),
    case(
        "gemm_sm90_registers_b_mn",
        Config("f16", (64, 64, 64), a_in_registers=True, b_major="mn"),
        (64, 64, 128),
    ),
    case("gemm_sm90_e4m3", Config("e4m3", tile=(64, 64, 128)), (64, 64, 256)),
    case("gemm_sm90_e5m2_64b", Config("e5m2", tile=(64, 64, 64)), (64, 64, 192)),
    case("gemm_sm90_multicast", Config(share_b=True), (256, 128, 192)),
)
