"""C [M, N] = A [M, K] B [N, K]^T on Blackwell: one warp loads by TMA, one issues tcgen05.mma, four store.

load warp --[ring of (A, B) tiles]--> multiply warp --(tensor memory)--> store warps --(TMA store)--> C
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
import torch
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator, get_num_tmem_alloc_cols
from cutlass.tensor_utils import LayoutEnum

from kernels.case import Case, Compiled, compile_for
from kernels.gemm_sm90 import TYPES, expected, integers, operands, stored_as

STORERS, MULTIPLIER, LOADER = 4, 4, 5
"""Warps 0 to 3 store; 4 multiplies; 5 loads."""
THREADS = 192
ALLOCATED, STORED = 1, 2
"""Named barriers: tensor memory is allocated (storing and multiplying warps); the storing warps."""


@dataclass(frozen=True)
class Config:
    """`tile` is (m, n, k) of one tcgen05.mma's CTA, or of its pair of CTAs with `ctas` 2. `cluster` counts
    CTAs along M and N; CTAs that need the same tile share it by multicast."""

    kind: str = "bf16"
    ctas: int = 1
    tile: tuple[int, int, int] = (128, 128, 64)
    cluster: tuple[int, int] = (1, 1)
    stages: int = 2
    a_major: str = "k"
    b_major: str = "k"
    store_columns: int = 32
    lanes: int = 32
    """Lanes of tensor memory that one tcgen05.ld reads: 32 (of 32 bits), or 16 (of 256 bits)."""

    @property
    def group(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) of C that one CTA stores."""
        return self.tile[0] // self.ctas, self.tile[1]


@dataclass(frozen=True)
class Parts:
    """Resources that the roles share: shared memory, rings, descriptors with their tensors, and where the CTA
    is."""

    a: cute.Tensor
    b: cute.Tensor
    c: cute.Tensor
    tiles: pipeline.PipelineTmaUmma
    sums: pipeline.PipelineUmmaAsync
    memory: TmemAllocator
    place: tuple[Any, ...]
    """(v, m, n, k) in the cluster."""


class Gemm:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.kind = TYPES[config.kind][0]
        self.kept = TYPES[stored_as(config.kind)][0]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream) -> None:
        config = self.config
        product, cluster = self.product(), self.cluster()
        a_layout, b_layout, c_layout = self.layouts()
        one_a, one_b = (cute.select(layout, mode=[0, 1, 2]) for layout in (a_layout, b_layout))
        arguments = (config.tile, product, cluster.shape)
        store = cpasync.CopyBulkTensorTileS2GOp()
        transfers = (
            cute.nvgpu.make_tiled_tma_atom_A(self.loading(config.cluster[1]), a, one_a, *arguments),
            cute.nvgpu.make_tiled_tma_atom_B(
                self.loading(config.cluster[0] // config.ctas), b, one_b, *arguments
            ),
            cpasync.make_tiled_tma_atom(store, c, cute.select(c_layout, mode=[0, 1]), self.stored()),
        )
        blocks = [cute.ceil_div(c.shape[i], config.block[i]) for i in range(2)]
        grid = [cute.round_up(blocks[i], config.cluster[i]) for i in range(2)]
        self.device(*transfers).launch(
            grid=[*grid, 1], block=[THREADS, 1, 1], cluster=[*config.cluster, 1], stream=stream
        )

    def loading(self, sharers: int) -> Any:
        """The TMA load of tiles that `sharers` CTAs need."""
        if sharers > 1:
            return cpasync.CopyBulkTensorTileG2SMulticastOp(self.config.group)
        return cpasync.CopyBulkTensorTileG2SOp(self.config.group)

    def product(self) -> cute.TiledMma:
        major = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
        majors = major[self.config.a_major], major[self.config.b_major]
        return sm100.make_trivial_tiled_mma(
            self.kind, self.kind, *majors, Float32, self.config.group, self.config.tile[:2]
        )

    def cluster(self) -> cute.Layout:
        """(v, m, n, k), v being a CTA's place in its pair."""
        return cute.tiled_divide(cute.make_layout((*self.config.cluster, 1)), (self.product().thr_id.shape,))

    def layouts(self) -> tuple[Any, Any, Any]:
        """Swizzled, a CTA's own: A ((m, k) of an instruction, their numbers, stage), B likewise with n,
        C (m, store_columns, 2)."""
        config, product = self.config, self.product()
        return (
            sm100.make_smem_layout_a(product, config.tile, self.kind, config.stages),
            sm100.make_smem_layout_b(product, config.tile, self.kind, config.stages),
            sm100.make_smem_layout_epi(self.kept, LayoutEnum.ROW_MAJOR, self.stored(), 2),
        )

    def storage(self) -> Any:
        members = {
            "tiles": cute.struct.MemRange[Int64, self.config.stages * 2],
            "sums": cute.struct.MemRange[Int64, 2],
            "freed": Int64,
            "columns": Int32,
        }
        for name, kind, layout in zip("abc", (self.kind, self.kind, self.kept), self.layouts()):
            members[name] = cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(layout)], 1024]
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @cute.kernel
    def device(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, c: cpasync.TmaInfo) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        parts = self.parts(SmemAllocator().allocate(self.storage()))
        count = cute.ceil_div(a.tma_tensor.shape[1], self.config.tile[2])
        cluster = self.cluster()
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
        if warp == LOADER:
            self.load((a, b), parts, count)
        if warp == MULTIPLIER:
            self.multiply(parts, count)
        if warp < STORERS:
            self.store(c, parts, warp)

    def parts(self, storage: Any) -> Parts:
        a, b, c = (
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip((storage.a, storage.b, storage.c), self.layouts())
        )
        cluster, ctas = self.cluster(), self.config.ctas
        alone = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        # Tiles are free when every pair of CTAs that they were multicast to has read them.
        readers = self.config.cluster[0] // ctas + self.config.cluster[1] - 1
        one = [cute.size_in_bytes(self.kind, cute.select(x.layout, mode=[0, 1, 2])) for x in (a, b)]
        tiles = pipeline.PipelineTmaUmma.create(
            num_stages=self.config.stages,
            producer_group=alone,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
            tx_count=sum(one) * ctas,
            barrier_storage=storage.tiles.data_ptr(),
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        sums = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=alone,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * STORERS * ctas),
            barrier_storage=storage.sums.data_ptr(),
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        memory = TmemAllocator(
            storage.columns.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(ALLOCATED, 32 * (STORERS + 1)),
            allocator_warp_id=0,
            is_two_cta=ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr,
        )
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return Parts(a, b, c, tiles, sums, memory, cluster.get_flat_coord(rank))

    @cute.jit
    def load(
        self,
        transfers: cutlass.Constexpr[tuple],  # type: ignore[type-arg]
        parts: cutlass.Constexpr[Parts],
        count: Int32,
    ) -> None:
        m, n, k = self.config.tile
        (a, b), (block_m, block_n, _) = transfers, cute.arch.block_idx()
        mine = self.product().get_slice(parts.place[0])
        a_tiles = mine.partition_A(cute.local_tile(a.tma_tensor, (m, k), (block_m // self.config.ctas, None)))
        b_tiles = mine.partition_B(cute.local_tile(b.tma_tensor, (n, k), (block_n, None)))
        # CTAs in a row of the cluster need the same A, those in a column the same B.
        a_to, a_from, a_mask = self.shares(a, parts.a, a_tiles, parts.place, 2)
        b_to, b_from, b_mask = self.shares(b, parts.b, b_tiles, parts.place, 1)
        ring = parts.tiles
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        for tile in cutlass.range(count, unroll=1):
            ring.producer_acquire(state)
            full, stage = ring.producer_get_barrier(state), state.index
            cute.copy(a.atom, a_from[None, tile], a_to[None, stage], tma_bar_ptr=full, mcast_mask=a_mask)
            cute.copy(b.atom, b_from[None, tile], b_to[None, stage], tma_bar_ptr=full, mcast_mask=b_mask)
            state.advance()
        ring.producer_tail(state)

    def shares(
        self, transfer: cpasync.TmaInfo, shared: cute.Tensor, tiles: cute.Tensor, place: Any, mode: int
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """(shared, global, mask): this CTA's part of what the CTAs along `mode` of the cluster load for each
        other."""
        cluster = self.cluster()
        sharers = cute.size(cluster, mode=[mode])
        views = cpasync.tma_partition(
            transfer.atom,
            place[mode],
            cute.make_layout(sharers),
            cute.group_modes(shared, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )
        if sharers == 1:
            return *views, None
        return *views, cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=mode)

    @cute.jit
    def multiply(self, parts: cutlass.Constexpr[Parts], count: Int32) -> None:
        product = self.product()
        atom = cute.make_mma_atom(product.op)
        a, b = product.make_fragment_A(parts.a), product.make_fragment_B(parts.b)
        parts.memory.wait_for_alloc()
        sums = self.sums(parts)
        if parts.place[0] == 0:
            tile = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
            result = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            parts.sums.producer_acquire(result)
            atom.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(count, unroll=1):
                parts.tiles.consumer_wait(tile)
                for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                    at = (None, None, step, tile.index)
                    cute.gemm(atom, sums, a[at], b[at], sums)
                    atom.set(tcgen05.Field.ACCUMULATE, True)
                parts.tiles.consumer_release(tile)
                tile.advance()
            parts.sums.producer_commit(result)
            result.advance()
            parts.sums.producer_tail(result)

    def sums(self, parts: Parts) -> cute.Tensor:
        """The tile of sums in tensor memory, once that is allocated."""
        return cute.make_tensor(parts.memory.retrieve_ptr(Float32), self.sums_layout())

    def nowhere(self) -> cute.Pointer:
        return cute.make_ptr(Float32, 0, cutlass.AddressSpace.tmem, assumed_align=16)

    def sums_layout(self) -> cute.Layout:
        product = self.product()
        return product.make_fragment_C(product.partition_shape_C(self.config.tile[:2])).layout

    @cute.jit
    def store(
        self, c: cutlass.Constexpr[cpasync.TmaInfo], parts: cutlass.Constexpr[Parts], warp: Int32
    ) -> None:
        """From tensor memory, `store_columns` at a time, over two buffers in shared memory."""
        lane = cute.arch.thread_idx()[0]
        memory, ring = parts.memory, parts.sums
        memory.allocate(get_num_tmem_alloc_cols(cute.make_tensor(self.nowhere(), self.sums_layout())))
        memory.wait_for_alloc()
        sums = self.sums(parts)[(None, None), 0, 0]
        blocks = cute.flat_divide(sums, self.stored())[None, None, 0, None]
        load, keep = self.copies(blocks)
        start = load.get_slice(lane).partition_S(blocks)
        sums_shape = load.get_slice(lane).partition_D(cute.make_identity_tensor(self.stored())).shape
        wide = cute.make_rmem_tensor(sums_shape, Float32)
        narrow = cute.make_rmem_tensor_like(wide, self.kept)
        kept = keep.get_slice(lane).partition_D(parts.c)
        from_shared, to_global = self.stores(c, parts)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        ring.consumer_wait(state)
        count = cute.size(blocks, mode=[2])
        for i in cutlass.range_constexpr(count):
            cute.copy(load, start[None, None, None, i], wide)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(i == count - 1):
                ring.consumer_release(state)
            narrow.store(wide.load().to(self.kept))
            if warp == 0:
                # the store before the last has read its buffer
                cute.arch.cp_async_bulk_wait_group(1, read=True)
            cute.arch.barrier(barrier_id=STORED, number_of_threads=32 * STORERS)
            cute.copy(keep, keep.retile(narrow), kept[None, None, None, i % 2])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=STORED, number_of_threads=32 * STORERS)
            if warp == 0:
                cute.copy(c.atom, from_shared[None, i % 2], to_global[None, i])
                cute.arch.cp_async_bulk_commit_group()
        memory.relinquish_alloc_permit()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STORED, number_of_threads=32 * STORERS)
        memory.free(memory.retrieve_ptr(Float32))

    def stored(self) -> tuple[int, int]:
        """(rows, columns) of one TMA store."""
        return self.config.block[0], self.config.store_columns

    def copies(self, blocks: cute.Tensor) -> tuple[cute.TiledCopy, cute.TiledCopy]:
        """Tensor memory to registers, and registers to shared memory, of one block."""
        columns = self.config.store_columns * self.config.block[0] // 32 // STORERS
        if self.config.lanes == 32:
            op = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns))
        else:
            op = tcgen05.Ld16x256bOp(tcgen05.Repetition(self.config.store_columns // 8))
        load = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), blocks[None, None, 0])
        keep = sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.kept, Float32, load)
        return load, cute.make_tiled_copy_D(keep, load)

    def stores(self, c: cpasync.TmaInfo, parts: Parts) -> tuple[cute.Tensor, cute.Tensor]:
        """(shared, global) views of C, whose last modes count buffers and column blocks."""
        block_m, block_n, _ = cute.arch.block_idx()
        block = cute.local_tile(c.tma_tensor, self.config.block, (block_m, block_n))
        columns = cute.flat_divide(block, self.stored())[None, None, 0, None]
        one = cute.make_layout(1)
        return cpasync.tma_partition(
            c.atom, 0, one, cute.group_modes(parts.c, 0, 2), cute.group_modes(columns, 0, 2)
        )


def build(arch: str, config: Config) -> Compiled:
    """Called as (a [M, K], b [N, K], c [M, N]), each with the stride 1 that its major says."""
    return compile_for(arch, Gemm(config), *operands(config))


def case(name: str, config: Config, shape: tuple[int, int, int]) -> Case:
    """`shape` is (M, N, K)."""
    m, n, k = shape
    dtype = TYPES[config.kind][1]
    return Case(
        name=name,
        archs=("sm_100a",),
        build=lambda arch: build(arch, config),
        inputs=lambda: (
            integers((m, k), config.a_major, dtype, 1),
            integers((n, k), config.b_major, dtype, 5),
        ),
        outputs=lambda: (torch.full((m, n), torch.nan, dtype=TYPES[stored_as(config.kind)][1]),),
        expected=expected,
    )


CASES = (
    case("gemm_sm100", Config(), (128, 128, 192)),
    case("gemm_sm100_edges", Config(), (200, 136, 168)),
    case("gemm_sm100_f16_64b", Config("f16", tile=(128, 64, 32), stages=3), (128, 64, 160)),
    case("gemm_sm100_32b", Config(tile=(128, 64, 16)), (128, 64, 48)),
    case("gemm_sm100_b_mn", Config(b_major="mn"), (128, 128, 128)),
    case("gemm_sm100_a_mn_b_mn_64b", Config(tile=(128, 96, 64), a_major="mn", b_major="mn"), (128, 96, 128)),
    case("gemm_sm100_m64", Config(tile=(64, 64, 64), lanes=16), (64, 64, 128)),
    case("gemm_sm100_16_lanes", Config(lanes=16), (128, 128, 64)),
    case("gemm_sm100_e4m3", Config("e4m3", tile=(128, 64, 128)), (128, 64, 256)),
    case("gemm_sm100_e5m2_b_mn", Config("e5m2", tile=(128, 64, 64), b_major="mn"), (128, 64, 192)),
    case("gemm_sm100_pair", Config(ctas=2, tile=(256, 128, 64), cluster=(2, 1)), (256, 128, 192)),
    case(
        "gemm_sm100_pair_m128",
        Config(ctas=2, tile=(128, 64, 64), cluster=(2, 1), store_columns=64),
        (128, 64, 192),
    ),
    case(
        "gemm_sm100_pair_b_mn",
        Config(ctas=2, tile=(256, 256, 64), cluster=(2, 1), b_major="mn"),
        (256, 256, 64),
    ),
    case("gemm_sm100_pair_share_b", Config(ctas=2, tile=(256, 64, 64), cluster=(4, 1)), (512, 64, 192)),
    case("gemm_sm100_pair_share_a", Config(ctas=2, tile=(256, 64, 64), cluster=(2, 2)), (256, 128, 192)),
)
