"""The Hopper forward kernel: descriptors and launch on the host, and on the device the split into roles.

producer warp --[q x warpgroups]--> consumer warpgroups --(TMA store)--> out
              --[k ring]---------->
              --[v ring]---------->

Where keys lie in pages, a second producer warp brings the values, or four copy rows.
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
from fa4flex.kernels.common.boxes import KeyLayouts, box_transfers, stage_layouts
from fa4flex.kernels.common.gathering_rings import tile_ring
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.products import ROWS, Mmas, tiled_products
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import Transfers, prefetch_descriptors, reordered, tile_room
from fa4flex.kernels.common.work import Grid, with_divisors
from fa4flex.kernels.fwd_sm90.config import HANDED, Config
from fa4flex.kernels.fwd_sm90.consumer import Consumer
from fa4flex.kernels.fwd_sm90.producer import Follower, PartProducer, Producer
from fa4flex.kernels.fwd_sm90.resources import Layouts, Shared
from fa4flex.kernels.fwd_sm90.roles import barrier_table
from fa4flex.kernels.fwd_sm90.rows import rows_of
from fa4flex.kernels.fwd_sm90.skipping import SkippingConsumer


class Forward:
    """A forward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "forward"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.rows = rows_of(config)
        self.barriers = barrier_table(
            config, config.kv_stages, config.dynamic, config.pingpong, config.producing
        )
        scheduler = TileScheduler(config, hooks, group=config.group, hands=config.dynamic)
        self.producers: tuple[Producer, ...] = (Producer(config, scheduler),)
        if config.producing == "apart":
            self.producers = (
                PartProducer(config, scheduler, "keys"),
                PartProducer(config, scheduler, "values"),
            )
        elif config.producing == "gathering":
            self.producers += (Follower(config, scheduler),)
        self.consumer = (SkippingConsumer if config.skip else Consumer)(config, hooks, scheduler)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        config = self.config
        arguments = self.views(arguments)
        kind = arguments.q.element_type
        transfers = self.transfers(arguments, self.layouts(arguments))
        if const_expr(config.lengths == "packed"):
            grid, ordered = self.rows.packed_grid(arguments), False
        else:
            ordered = config.longest_first or config.tables or self.hooks.spans is not None
            grid = self.rows.grid(arguments, ordered)
        if const_expr(config.divisors):
            grid = with_divisors(grid, arguments, ordered)
        blocks = self.blocks(arguments, grid)
        q, k, v, out = transfers.q, transfers.k, transfers.v, transfers.out
        self.device(arguments, grid, q, k, v, out, self.products(kind)).launch(
            grid=[blocks, 1, 1],
            block=[config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=config.blocks,  # without it the compiler drops the register split
            preferred_smem_carveout=config.carveout,
        )

    def views(self, arguments: Arguments) -> Arguments:
        """The arguments, q, k and v as products read them."""
        return arguments

    def products(self, kind: Any) -> Mmas:
        return tiled_products(kind, self.config.tile_n, self.config.head_dim_v)

    def blocks(self, arguments: Arguments, grid: Grid) -> Int32:
        """Number of blocks of a launch."""
        return cutlass.min(grid.total, self.config.workers) if self.config.persistent else grid.total

    def layouts(self, arguments: Arguments) -> Layouts:
        config, row, kind = self.config, LayoutEnum.ROW_MAJOR, arguments.q.element_type
        n, d, dv = config.tile_n, config.head_dim, config.head_dim_v
        return Layouts(
            sm90.make_smem_layout_a(row, (ROWS, n, d), kind, config.consumers * config.q_stages),
            *self.stages(kind),
            sm90.make_smem_layout_a(row, (ROWS, n, dv), arguments.out.element_type, config.consumers),
        )

    def stages(self, kind: Any) -> KeyLayouts:
        return stage_layouts(self.config, kind, self.config.boxes)

    def transfers(self, arguments: Arguments, layouts: Any) -> Transfers:
        config = self.config
        dense = cute.rank(arguments.q) == 4
        rows, columns = ([1, 3, 2, 0], [3, 1, 2, 0]) if dense else ([0, 2, 1], [2, 0, 1])
        # cute.slice_ aborts the compiler where eights of keys have three blocks of columns
        q_one, k_one, v_one, out_one = (cute.select(layout, mode=[0, 1]) for layout in layouts)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        d, dv, n = config.head_dim, config.head_dim_v, config.tile_n
        of_queries = self.rows.transfer(load, arguments.q, q_one, d)
        if config.gathers:
            return Transfers(of_queries, None, None, None)
        if config.boxes is not None:
            return Transfers(of_queries, *box_transfers(load, arguments, (k_one, v_one), config.boxes), None)
        k, v = reordered(arguments.k, rows), reordered(arguments.v, columns)
        return Transfers(
            of_queries,
            cpasync.make_tiled_tma_atom(load, k, k_one, (n, d)),
            cpasync.make_tiled_tma_atom(load, v, v_one, (dv, n)),
            self.rows.transfer(store, arguments.out, out_one, dv) if self.stores(arguments) else None,
        )

    def stores(self, arguments: Arguments) -> bool:
        """True if the output leaves by TMA."""
        return self.config.lengths == "dense" and arguments.out.element_type.width == 16

    def storage(self, layouts: Any, arguments: Arguments) -> Any:
        return cute.struct(type("Storage", (), {"__annotations__": self.members(layouts, arguments)}))

    def members(self, layouts: Any, arguments: Arguments) -> dict[str, Any]:
        """Shared memory by name, in order."""
        config = self.config
        kind, out_kind = arguments.q.element_type, arguments.out.element_type
        return {
            "barriers": room(self.barriers),
            "next": cute.struct.Align[cute.struct.MemRange[Int32, self.handed], 16],
            "queries": tile_room(kind, cute.cosize(layouts.q)),
            "keys": tile_room(kind, cute.cosize(layouts.k)),
            "values": tile_room(self.value_kind(kind), cute.cosize(layouts.v)),
            "out": tile_room(out_kind, 0 if config.alias_output else cute.cosize(layouts.out)),
        }

    def value_kind(self, kind: Any) -> Any:
        """Dtype of values, where queries have this one."""
        return kind

    @cute.kernel
    def device(
        self,
        arguments: Arguments,
        grid: Grid,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo | None,
        v: cpasync.TmaInfo | None,
        out: cpasync.TmaInfo | None,
        mma: Mmas,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        transfers = Transfers(q, k, v, out)
        if warp == 0:
            prefetch_descriptors(q, k, v)
        layouts = self.layouts(arguments)
        storage = SmemAllocator().allocate(self.storage(layouts, arguments))
        shared = self.shared(storage, layouts, arguments)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        if const_expr(self.config.splits):
            # What merges parts may be launched now: it waits for the end of this kernel.
            cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            for number in cutlass.range_constexpr(len(self.producers)):
                # Followers are the same code.
                if warp >= number if self.producers[number].follows else warp == number:
                    self.producers[number].run(arguments, grid, transfers, shared, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumer.run(arguments, grid, transfers, shared, pipes, mma)

    def shared(self, storage: Any, layouts: Any, arguments: Arguments) -> Shared:
        q_layout, k_layout, v_layout, out_layout = layouts
        q = storage.queries.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        if self.config.alias_output:
            # Each warpgroup's output in the room of its own queries, which may be wider.
            pointer = cute.recast_ptr(q.iterator, out_layout.inner, dtype=arguments.out.element_type)
            groups = cute.make_layout(self.config.consumers, stride=ROWS * self.config.head_dim)
            out = cute.make_tensor(pointer, cute.append(cute.select(out_layout.outer, mode=[0, 1]), groups))
        else:
            out = storage.out.get_tensor(out_layout.outer, swizzle=out_layout.inner)
        return Shared(
            q,
            storage.keys.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            storage.values.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            out,
        )

    @property
    def handed(self) -> int:
        """Numbers of 32 bits in which a tile is handed over."""
        return HANDED

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        at, table, warps = mbarriers(self.barriers, storage), self.barriers, self.config.gather_warps
        number = storage.next.get_tensor(cute.make_layout(self.handed))
        return pipes_of(
            at,
            k=tile_ring(at["k_full"], shared.k, table["k_empty"].arrivals, warps),
            v=tile_ring(at["v_full"], shared.v, table["v_empty"].arrivals, warps),
            next=NextTile(number, at["next_full"], at["next_empty"]),
        )
