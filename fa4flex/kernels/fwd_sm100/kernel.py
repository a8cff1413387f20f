"""The Blackwell forward kernel: descriptors and launch on the host, and on the device the split into roles.

load warp --[q x tiles]--> multiply warp <--(probabilities)--> softmax warpgroups
          --[k ring]----->      |     ^                               | (scales, denominators)
          --[v ring]----->      | (outputs in tensor memory)          v
                                +-----+------------------> correction warpgroup --[out ring]--> store warp
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room, sync
from fa4flex.kernels.common.boxes import box_transfers
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.tensor_core import operand_ring, tensor_memory
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import Transfers, reordered, tile_room
from fa4flex.kernels.common.work import Grid, dense_grid, packed_grid
from fa4flex.kernels.fwd_sm100.config import COLUMNS, ROWS, Config
from fa4flex.kernels.fwd_sm100.correction import Correction
from fa4flex.kernels.fwd_sm100.epilogue import Epilogue, store_atom
from fa4flex.kernels.fwd_sm100.launch_control import Cancelling
from fa4flex.kernels.fwd_sm100.load import Load
from fa4flex.kernels.fwd_sm100.mma import Mma
from fa4flex.kernels.fwd_sm100.mma_ahead import MmaAhead
from fa4flex.kernels.fwd_sm100.resources import Products, Shared, chunk_columns
from fa4flex.kernels.fwd_sm100.roles import (
    ALLOCATED,
    CORRECTION,
    FINISHED,
    LOAD,
    MULTIPLY,
    SCHEDULE,
    STORE,
    WARPS,
    barrier_table,
)
from fa4flex.kernels.fwd_sm100.schedule import Scheduler
from fa4flex.kernels.fwd_sm100.skipping import SkippingSoftmax
from fa4flex.kernels.fwd_sm100.softmax import Softmax
from fa4flex.kernels.plan.paging import Boxes


class Forward:
    """A forward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "forward"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.barriers = barrier_table(config, config.handed, config.ctas)
        cluster = self.cluster = Cluster(config.ctas)
        tiles: TileScheduler = TileScheduler(config, hooks, config.ctas, looped=True)
        if config.cancel:
            tiles = Cancelling(config, hooks, cluster)
        self.tiles = tiles
        self.schedule = Scheduler(tiles)
        self.load = Load(config, tiles, cluster)
        self.mma = (MmaAhead if config.score_stages > 1 else Mma)(config, tiles, cluster)
        self.softmax = (SkippingSoftmax if config.skip else Softmax)(config, hooks, tiles, cluster)
        self.correction = Correction(config, hooks, tiles, cluster)
        self.epilogue = Epilogue(config, tiles, cluster)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        config = self.config
        arguments = self.views(arguments)
        transfers = self.transfers(arguments)
        if const_expr(config.lengths == "packed"):
            grid = packed_grid(arguments, config.tile_m)
        else:
            ordered = config.longest_first or config.tables or self.hooks.spans is not None
            grid = dense_grid(arguments, config.tile_m, ordered)
        blocks = grid.total
        if const_expr(config.persistent and not config.cancel):
            blocks = cutlass.min(blocks, max(config.workers // config.ctas, 1))
        self.device(arguments, grid, *transfers).launch(
            grid=[blocks * config.ctas, 1, 1],
            block=[32 * WARPS, 1, 1],
            cluster=[config.ctas, 1, 1] if const_expr(config.ctas > 1) else None,
            stream=stream,
            min_blocks_per_mp=1,  # without it the compiler drops the register split
        )

    def views(self, arguments: Arguments) -> Arguments:
        """The arguments, q, k and v as products read them."""
        return arguments

    def transfers(self, arguments: Arguments) -> tuple[Any, ...]:
        config, products = self.config, self.products(arguments)
        dense = cute.rank(arguments.q) == 4
        rows, columns = ([1, 3, 2, 0], [3, 1, 2, 0]) if dense else ([0, 2, 1], [2, 0, 1])
        if config.paged:
            return self.of_pages(arguments, products, reordered(arguments.q, rows))
        q, k, out = (reordered(x, rows) for x in (arguments.q, arguments.k, arguments.out))
        v = reordered(arguments.v, columns)
        one = [cute.select(layout, mode=[0, 1, 2]) for layout in products.layouts()]
        load = cpasync.CopyBulkTensorTileG2SOp(self.cluster.group)
        cluster = self.cluster.layout(products.scores).shape
        scores, values = (products.scores_tile, products.scores), (products.values_tile, products.values)
        chunk = self.out_layout(arguments.out.element_type)
        return (
            cute.nvgpu.make_tiled_tma_atom_A(load, q, one[0], *scores, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(load, k, one[1], *scores, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(load, v, one[2], *values, cluster),
            None if chunk is None else store_atom(out, cute.select(chunk, mode=[0, 1]), config),
        )

    def of_pages(self, arguments: Arguments, products: Products, q: Any) -> tuple[Any, ...]:
        """Descriptors where keys lie in pages; none of the output, whose rows go straight to memory."""
        load = cpasync.CopyBulkTensorTileG2SOp(self.cluster.group)
        cluster = self.cluster.layout(products.scores).shape
        one = cute.select(products.layouts()[0], mode=[0, 1, 2])
        tiles = tuple(cute.slice_(layout, (None, None, 0)) for layout in products.tile_layouts())
        return (
            cute.nvgpu.make_tiled_tma_atom_A(load, q, one, products.scores_tile, products.scores, cluster),
            *box_transfers(load, arguments, tiles, Boxes(self.config.box_rows)),
            None,
        )

    def products(self, arguments: Arguments) -> Products:
        return Products(self.config, arguments.q.element_type, self.cluster)

    def out_layout(self, kind: Any) -> Any:
        """(128, columns, stage), swizzled; None where rows go straight to global memory."""
        config = self.config
        if config.lengths != "dense" or config.out_stages == 0:
            return None
        shape = (ROWS, chunk_columns(config, kind))
        return sm100.make_smem_layout_epi(kind, LayoutEnum.ROW_MAJOR, shape, config.out_stages)

    def storage(self, products: Products, out_kind: Any) -> Any:
        return cute.struct(type("Storage", (), {"__annotations__": self.members(products, out_kind)}))

    def members(self, products: Products, out_kind: Any) -> dict[str, Any]:
        """Shared memory by name, in order."""
        config = self.config
        members: dict[str, Any] = {
            "barriers": room(self.barriers),
            "next": cute.struct.Align[cute.struct.MemRange[Int32, config.next_words], 16],
            "freed": Int64,
            "columns": Int32,
        }
        finals = cute.struct.MemRange[Float32, ROWS * config.q_tiles * config.last_numbers]
        scales = cute.struct.MemRange[Float32, ROWS * config.q_tiles * config.score_stages]
        members |= {"scales": scales, "finals": finals}
        names, kinds = ("queries", "keys", "values"), (products.kind, products.kind, products.value_kind)
        for name, kind, layout in zip(names, kinds, products.layouts(), strict=True):
            members[name] = tile_room(kind, cute.cosize(layout))
        chunk = self.out_layout(out_kind)
        members["out"] = tile_room(out_kind, 0 if chunk is None else cute.cosize(chunk))
        return members

    @cute.kernel
    def device(
        self,
        arguments: Arguments,
        grid: Grid,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        out: cpasync.TmaInfo | None,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        registers = self.config.registers
        transfers = Transfers(q, k, v, out)
        products = self.products(arguments)
        storage = SmemAllocator().allocate(self.storage(products, arguments.out.element_type))
        shared = self.shared(storage, products, arguments.out.element_type)
        pipes = self.pipes(storage, shared, products)
        allocated = pipeline.NamedBarrier(ALLOCATED.number, ALLOCATED.threads)
        memory = tensor_memory(storage, CORRECTION, allocated, self.config.ctas)
        if warp == LOAD:
            for transfer in (q, k, v):
                cpasync.prefetch_descriptor(transfer.atom)
        if warp == 0:
            initialise(self.barriers, storage)
        ctas = self.cluster.layout(products.scores)
        pipeline.pipeline_init_arrive(cluster_shape_mn=ctas, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=ctas)
        if warp >= MULTIPLY:
            cute.arch.setmaxregister_decrease(registers.other)
            if warp == MULTIPLY:
                memory.wait_for_alloc()
                base = memory.retrieve_ptr(Float32)
                if self.cluster.leads():
                    self.mma.run(arguments, grid, shared, pipes, products, base)
            if warp == LOAD:
                self.load.run(arguments, grid, transfers, shared, pipes, products)
            if const_expr(out is not None):  # noqa: SIM102  one is decided when compiled, one when run
                if warp == STORE:
                    self.epilogue.run(arguments, grid, transfers, shared, pipes)
            if const_expr(self.config.handed):  # noqa: SIM102
                if warp == SCHEDULE:
                    self.schedule.run(arguments, grid, pipes)
        elif warp >= CORRECTION:
            cute.arch.setmaxregister_decrease(registers.correction)
            memory.allocate(COLUMNS)
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            self.correction.run(arguments, grid, shared, pipes, products, base)
            memory.relinquish_alloc_permit()
            sync(FINISHED)
            memory.free(base)
        elif const_expr(registers.idle == 0):
            cute.arch.setmaxregister_increase(registers.softmax)
            memory.wait_for_alloc()
            base = memory.retrieve_ptr(Float32)
            if warp < 4 * self.config.q_tiles:
                self.softmax.run(arguments, grid, shared, pipes, products, base)
        elif warp < 4 * self.config.q_tiles:
            cute.arch.setmaxregister_increase(registers.softmax)
            memory.wait_for_alloc()
            self.softmax.run(arguments, grid, shared, pipes, products, memory.retrieve_ptr(Float32))
        else:
            cute.arch.setmaxregister_decrease(registers.idle)
            memory.wait_for_alloc()
        self.cluster.depart()

    def shared(self, storage: Any, products: Products, out_kind: Any) -> Shared:
        q, k, v = products.layouts()
        chunk = self.out_layout(out_kind)
        rows = cute.make_layout((ROWS, self.config.q_tiles * self.config.last_numbers))
        scales = cute.make_layout((ROWS, self.config.q_tiles * self.config.score_stages))
        return Shared(
            storage.queries.get_tensor(q.outer, swizzle=q.inner),
            storage.keys.get_tensor(k.outer, swizzle=k.inner),
            storage.values.get_tensor(v.outer, swizzle=v.inner),
            None if chunk is None else storage.out.get_tensor(chunk.outer, swizzle=chunk.inner),
            storage.scales.get_tensor(scales),
            storage.finals.get_tensor(rows),
            tuple(
                tiles.get_tensor(layout.outer, swizzle=layout.inner)
                for tiles, layout in zip((storage.keys, storage.values), products.tile_layouts())
            )
            if self.config.paged
            else None,
        )

    def pipes(self, storage: Any, shared: Shared, products: Products) -> Pipes:
        ctas, cluster = self.config.ctas, self.cluster.layout(products.scores)
        number = storage.next.get_tensor(cute.make_layout(self.config.next_words))
        at = mbarriers(self.barriers, storage)
        return pipes_of(
            at,
            k=operand_ring(at["k_full"], shared.k, ctas, cluster),
            v=operand_ring(at["v_full"], shared.v, ctas, cluster),
            next=NextTile(number, at["next_full"], at["next_empty"]),
        )
