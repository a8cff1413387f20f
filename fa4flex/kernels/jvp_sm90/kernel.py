"""The Hopper kernel of attention and its tangents: descriptors and launch on the host, and on the device the
split into roles.

producer warp --[q and tq x warpgroups]--> consumer warpgroups --> out, tout, lse, tlse
              --[k and tk ring]---------->
              --[v and tv ring]---------->
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings import driver as cuda
from cutlass import Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room
from fa4flex.kernels.common.boxes import Layouts, stage_layouts
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.products import ROWS, Mmas, tiled_products
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import prefetch_descriptors, reordered, tile_room
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.roles import barrier_table
from fa4flex.kernels.fwd_sm90.rows import rows_of
from fa4flex.kernels.jvp_sm90.config import Config
from fa4flex.kernels.jvp_sm90.consumer import Consumer
from fa4flex.kernels.jvp_sm90.producer import Producer
from fa4flex.kernels.jvp_sm90.resources import Shared, Transfers

PARTS = "q", "k", "v"


class Tangents:
    """A kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "tangents"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.rows = rows_of(config)
        self.barriers = barrier_table(config, config.kv_stages, config.dynamic, config.pingpong)
        scheduler = TileScheduler(config, hooks, hands=config.dynamic)
        self.producer = Producer(config, scheduler)
        self.consumer = Consumer(config, hooks, scheduler)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        config = self.config
        kind = arguments.q.element_type
        transfers = self.transfers(arguments, self.layouts(kind))
        if const_expr(config.lengths == "packed"):
            grid = self.rows.packed_grid(arguments)
        else:
            ordered = config.longest_first or config.tables or self.hooks.spans is not None
            grid = self.rows.grid(arguments, ordered)
        mma = tiled_products(kind, config.tile_n, config.head_dim_v)
        self.device(arguments, grid, *vars(transfers).values(), mma).launch(
            grid=[cutlass.min(grid.total, config.workers), 1, 1],
            block=[config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without it the compiler drops the register split
        )

    def layouts(self, kind: Any) -> Layouts:
        """Swizzled shared-memory layouts of q, k and v, which are those of their tangents; the last mode
        counts warpgroups or stages."""
        config = self.config
        shape = ROWS, config.tile_n, config.head_dim
        q = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, kind, config.consumers)
        return Layouts(q, *stage_layouts(config, kind))

    def transfers(self, arguments: Arguments, layouts: Layouts) -> Transfers:
        config, load = self.config, cpasync.CopyBulkTensorTileG2SOp()
        dense = cute.rank(arguments.q) == 4
        rows, columns = ([1, 3, 2, 0], [3, 1, 2, 0]) if dense else ([0, 2, 1], [2, 0, 1])
        q, k, v = (cute.select(layout, mode=[0, 1]) for layout in layouts)
        d, dv, n = config.head_dim, config.head_dim_v, config.tile_n

        def of(q_like: Any, k_like: Any, v_like: Any) -> tuple[Any, ...]:
            return (
                None if q_like is None else self.rows.transfer(load, q_like, q, d),
                None
                if k_like is None
                else cpasync.make_tiled_tma_atom(load, reordered(k_like, rows), k, (n, d)),
                None
                if v_like is None
                else cpasync.make_tiled_tma_atom(load, reordered(v_like, columns), v, (dv, n)),
            )

        return Transfers(
            *of(arguments.q, arguments.k, arguments.v),
            *of(arguments.tq, arguments.tk, arguments.tv),
        )

    def storage(self, layouts: Layouts, kind: Any) -> Any:
        """Shared memory by name, in order."""
        regions: dict[str, Any] = {
            "barriers": room(self.barriers),
            "next": cute.struct.Align[cute.struct.MemRange[Int32, HANDED], 16],
        }
        for name, layout in zip(PARTS, layouts, strict=True):
            regions[name] = tile_room(kind, cute.cosize(layout))
        for name, layout in zip(PARTS, layouts, strict=True):
            if name in self.config.moved:
                regions[f"t{name}"] = tile_room(kind, cute.cosize(layout))
        return cute.struct(type("Storage", (), {"__annotations__": regions}))

    @cute.kernel
    def device(
        self,
        arguments: Arguments,
        grid: Grid,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        tq: cpasync.TmaInfo | None,
        tk: cpasync.TmaInfo | None,
        tv: cpasync.TmaInfo | None,
        mma: Mmas,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        transfers = Transfers(q, k, v, tq, tk, tv)
        if warp == 0:
            prefetch_descriptors(q, k, v, tq, tk, tv)
        kind = arguments.q.element_type
        layouts = self.layouts(kind)
        storage = SmemAllocator().allocate(self.storage(layouts, kind))
        shared = self.shared(storage, layouts)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp == 0:
                self.producer.run(arguments, grid, transfers, shared, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumer.run(arguments, grid, transfers, shared, pipes, mma)

    def shared(self, storage: Any, layouts: Layouts) -> Shared:
        """Tiles of q, k, v, then of their tangents."""
        tiles = [
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in zip(PARTS, layouts, strict=True)
        ]
        moving = [
            getattr(storage, f"t{name}").get_tensor(layout.outer, swizzle=layout.inner)
            if name in self.config.moved
            else None
            for name, layout in zip(PARTS, layouts, strict=True)
        ]
        return Shared(*tiles, *moving)

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, table = mbarriers(self.barriers, storage), self.barriers
        number = storage.next.get_tensor(cute.make_layout(HANDED))

        def ring(name: str, tile: Any) -> Any:
            tiles = 1 + (name in self.config.moved)
            return tile_ring(at[f"{name}_full"], tile, table[f"{name}_empty"].arrivals, tiles=tiles)

        return pipes_of(
            at,
            k=ring("k", shared.k),
            v=ring("v", shared.v),
            next=NextTile(number, at["next_full"], at["next_empty"]),
        )
