"""The Hopper backward kernel: descriptors and launch on the host, and on the device the split into roles.

producer warp --[k, v once; q, dout rings]--> consumer warpgroups --(dQ parts)--> writer warp --> dq_sum
                                              consumer warpgroups --> dk, dv

A block has one tile of keys, or is persistent and takes one after another: the producer takes their numbers
from a counter and hands them on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.bwd_sm90.clearing import Clearer, Clearing
from fa4flex.kernels.bwd_sm90.column_split import ColumnConsumer
from fa4flex.kernels.bwd_sm90.config import KEYS, Config, swizzle
from fa4flex.kernels.bwd_sm90.consumer import Consumer
from fa4flex.kernels.bwd_sm90.dq_store import DqStore, Moved, others
from fa4flex.kernels.bwd_sm90.exchange import Exchange
from fa4flex.kernels.bwd_sm90.pair_split import PairedKeyGradient, PairedValueGradient
from fa4flex.kernels.bwd_sm90.producer import Producer, Transfers
from fa4flex.kernels.bwd_sm90.product_split import KeyGradient, ValueGradient
from fa4flex.kernels.bwd_sm90.resources import Layouts, Mmas, Shared, swizzled_rows
from fa4flex.kernels.bwd_sm90.roles import CLEARER, EXCHANGE, barrier_table
from fa4flex.kernels.bwd_sm90.zero_fill import WARPS, ZeroFill
from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyGrid, written
from fa4flex.kernels.common.barriers import Pipes, initialise, mbarriers, pipes_of, room
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.products import tiled_product
from fa4flex.kernels.common.transfer import prefetch_descriptors, reordered, tile_room, tokens_first

CONSUMERS = {"keys": (Consumer,), "columns": (ColumnConsumer,), "products": (ValueGradient, KeyGradient)}
"""Classes of consumers, by what their warpgroups share out: of all warpgroups, or of each."""
PAIRED = PairedValueGradient, PairedKeyGradient
"""Those of a pair of CTAs."""


class Backward:
    """A backward kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "backward"
    """Schema of its arguments."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.cluster = Cluster(config.ctas)
        self.scheduler = BackwardTileScheduler(config, hooks, config.ctas, packed_sections=True)
        self.producer = Producer(config, self.scheduler)
        self.copied = tuple(share for share in hooks.shares if share.rate == "copy")
        self.barriers = barrier_table(config)
        self.clearer = Clearer(self.scheduler)
        self.writer = DqStore(config, self.copied, self.scheduler, self.clearer)
        self.exchange = Exchange(config, self.scheduler)
        self.eraser = ZeroFill(config, hooks, self.scheduler)
        kinds = CONSUMERS[config.split] if config.ctas == 1 else PAIRED
        consumers = [kind(config, hooks, self.scheduler) for kind in kinds]
        self.consumer, self.last_consumer = consumers[0], consumers[-1]
        self.along_keys = self.consumer.along_keys

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream: cuda.CUstream) -> None:
        config = self.config
        grid = self.scheduler.grid(arguments)
        transfers = self.transfers(arguments)
        clearing = self.clearer.of(grid, arguments) if const_expr(config.clears) else None
        blocks = grid.total
        if const_expr(config.persistent):
            blocks = cutlass.min(blocks, config.workers)
        self.device(arguments, grid, clearing, transfers).launch(
            grid=[blocks * config.ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[config.ctas, 1, 1] if const_expr(config.ctas > 1) else None,
            stream=stream,
            min_blocks_per_mp=config.blocks,  # without it the compiler drops the register split
            preferred_smem_carveout=config.carveout,
            use_pdl=True,
        )

    def first_heads(self, arguments: BackwardArguments) -> Int32:
        """Number of query heads in the first section of heads."""
        grid = self.scheduler.grid(arguments)
        assert grid.sections is not None
        return grid.sections.width.divisor * grid.group

    def mmas(self, kind: Any) -> Mmas:
        config = self.config
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        product = partial(tiled_product, kind)
        ds_major, ds_t_major = (k_major, mn_major) if self.along_keys else (mn_major, k_major)
        if config.transposes_dq:
            dq = [product((mn_major, ds_major), rows) for rows, _ in config.dq_shapes]
        else:
            dq = [product((ds_major, mn_major), columns) for _, columns in config.dq_shapes]
        # With columns shared out, a warpgroup's scores are a part of what its dV and dK need.
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        share, source = config.consumers, memory
        if config.split != "columns":
            share, source, ds_t_major = 1, registers, k_major
        return Mmas(
            product((k_major, k_major), config.queries, registers if config.keeps_k else memory),
            product((k_major, k_major), config.queries, registers if config.split == "products" else memory),
            product((k_major, mn_major), config.head_dim_v // share, source),
            product((ds_t_major, mn_major), config.head_dim // share, source),
            tuple(dq),
        )

    def layouts(self, kind: Any) -> Layouts:
        """ds and p lie along the queries; ds along the keys where it is copied to captured gradients, or dQ
        is transposed."""
        config = self.config
        m, n, d, dv = config.tile_m, config.block_keys, config.head_dim, config.head_dim_v
        of = config.swizzles

        def along_queries() -> Any:
            return sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, (m, d, n), kind, 2 * config.ctas)

        ds = swizzled_rows(kind, (m, n, 2), swizzle(n, n)) if self.along_keys else along_queries()
        return Layouts(
            swizzled_rows(kind, (m, d, config.q_stages), of.q),
            swizzled_rows(kind, (m, dv, config.do_stages), of.dout),
            swizzled_rows(kind, (n, d, 1), of.k),
            swizzled_rows(kind, (n, dv, 1), of.v),
            ds,
            along_queries() if config.split == "columns" else ds,
        )

    def transfers(self, arguments: BackwardArguments) -> Transfers:
        config = self.config
        q, dout, k, v, *_ = (cute.slice_(x, (None, None, 0)) for x in self.layouts(arguments.q.element_type))
        load = cpasync.CopyBulkTensorTileG2SOp()
        m, n, d, dv = config.tile_m, config.block_keys, config.head_dim, config.head_dim_v

        def atom(tensor: cute.Tensor, layout: Any, tile: tuple[int, int]) -> Any:
            return cpasync.make_tiled_tma_atom(load, self.rows(tensor), layout, tile)

        return Transfers(
            atom(arguments.q, q, (m, d)),
            atom(arguments.k, k, (n, d)),
            atom(arguments.v, v, (n, dv)),
            atom(arguments.dout, dout, (m, dv)),
            self.peer_keys(arguments),
            self.copies(arguments),
            self.stores(arguments),
            self.dq_store(arguments),
        )

    def rows(self, tensor: cute.Tensor) -> cute.Tensor:
        """A tensor as TMA moves it."""
        return tokens_first(tensor, self.config.ragged)

    def peer_layout(self, kind: Any) -> Any:
        """Columns of the keys of a pair's other CTA: where V was, and as K lies."""
        config = self.config
        width = config.head_dim // config.ctas
        return swizzled_rows(kind, (config.block_keys, width, 1), config.swizzles.k)

    def peer_keys(self, arguments: BackwardArguments) -> cpasync.TmaInfo | None:
        """Descriptor of the keys of a pair's other CTA."""
        if self.config.ctas == 1:
            return None
        layout = cute.slice_(self.peer_layout(arguments.k.element_type), (None, None, 0))
        tile, load = (cute.size(layout, mode=[i]) for i in range(2)), cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(load, self.rows(arguments.k), layout, tuple(tile))

    def copies(self, arguments: BackwardArguments) -> tuple[cpasync.TmaInfo, ...]:
        """Descriptors of captured gradients (queries, keys, other axes) that take tiles of dS."""
        ds = cute.slice_(self.layouts(arguments.q.element_type).ds, (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        tile = self.config.tile_m, self.config.tile_n
        found = []
        for share in self.copied:
            gradient = arguments.gradients[share.which]
            # The first mode counts copies, of which there is one.
            axes = [*share.axes, *others(share, gradient)]
            found.append(
                cpasync.make_tiled_tma_atom(store, reordered(gradient, [1 + i for i in axes]), ds, tile)
            )
        return tuple(found)

    def stores(self, arguments: BackwardArguments) -> tuple[cpasync.TmaInfo, ...]:
        """Descriptors of dK and dV, for which persistent blocks then need not wait."""
        config = self.config
        if not config.persistent:
            return ()
        widths = config.head_dim, config.head_dim_v
        gradients = (self.rows(x) for x in written(arguments))
        return tuple(store_of(x, (KEYS, width)) for x, width in zip(gradients, widths, strict=True))

    def dq_store(self, arguments: BackwardArguments) -> cpasync.TmaInfo | None:
        """Descriptor of dQ, where it is stored."""
        config = self.config
        if not config.stores_dq:
            return None
        (shape,) = config.dq_shapes
        return store_of(self.rows(arguments.dq), shape)

    def storage(self, kind: Any) -> Any:
        config = self.config
        q, dout, k, v, ds, p = (cute.cosize(x) for x in self.layouts(kind))
        members = {
            "barriers": room(self.barriers),
            "next": cute.struct.MemRange[Int32, 1],
            "lse2": cute.struct.Align[cute.struct.MemRange[Float32, config.tile_m * config.q_stages], 128],
            "delta": cute.struct.Align[cute.struct.MemRange[Float32, config.tile_m * config.do_stages], 128],
            "q": tile_room(kind, q),
            "dout": tile_room(kind, dout),
            "k": tile_room(kind, k),
            "v": tile_room(kind, v),
            "ds": tile_room(kind, ds),
            "p": tile_room(*self.shared_p(kind, p)),
            "dq": tile_room(Float32, config.dq_room * config.dq_parts * config.dq_stages),
        }
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    def shared_p(self, kind: Any, size: int) -> tuple[Any, int]:
        """Element type of what warpgroups show each other of P', and how many there are. `size`: of two
        stages in 16 bits."""
        config = self.config
        if config.split == "products":
            return Float32, config.tile_m * config.block_keys
        return kind, size if config.split == "columns" else 0

    @cute.kernel
    def device(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        clearing: Clearing | None,
        transfers: Transfers,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            prefetch_descriptors(*transfers[:5], *transfers.copies, *transfers.stores, transfers.dq)
        kind = arguments.q.element_type
        storage = SmemAllocator().allocate(self.storage(kind))
        shared = self.shared(storage, kind)
        pipes = self.pipes(storage, shared)
        if warp == 0:
            initialise(self.barriers, storage)
        ctas = cute.make_layout((self.config.ctas, 1, 1)) if const_expr(self.config.ctas > 1) else None
        pipeline.pipeline_init_arrive(cluster_shape_mn=ctas, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=ctas)
        # All of a block: one that ended before the kernel before this one could let the next one begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp == 0:
                self.producer.run(arguments, grid, transfers, shared, pipes)
            if warp == 1:
                moved = Moved(transfers.dq, tuple(transfers.copies), clearing)
                self.writer.run(arguments, grid, shared, pipes, moved)
            if const_expr(self.config.clears):  # noqa: SIM102
                if warp == CLEARER:
                    self.clearer.run(arguments, grid, clearing, pipes)
            if const_expr(self.config.ctas > 1):  # noqa: SIM102
                if warp == EXCHANGE:
                    self.exchange.run(arguments, grid, transfers.peer_keys, shared, pipes)
            if warp >= 4 - WARPS:
                self.eraser.run(arguments, grid, warp - (4 - WARPS))
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            if const_expr(self.consumer is self.last_consumer):
                self.consumer.run(arguments, grid, shared, pipes, self.mmas(kind), tuple(transfers.stores))
            else:
                if warp < 8:
                    self.consumer.run(
                        arguments, grid, shared, pipes, self.mmas(kind), tuple(transfers.stores)
                    )
                else:
                    self.last_consumer.run(
                        arguments, grid, shared, pipes, self.mmas(kind), tuple(transfers.stores)
                    )
        self.cluster.depart()

    def shared(self, storage: Any, kind: Any) -> Shared:
        config = self.config
        q, dout, k, v, ds, p = self.layouts(kind)

        def one(member: Any, layout: Any) -> cute.Tensor:
            return member.get_tensor(layout.outer, swizzle=layout.inner)[None, None, 0]

        shown = None
        if config.split == "columns":
            shown = storage.p.get_tensor(p.outer, swizzle=p.inner)
        elif config.split == "products":
            shown = storage.p.get_tensor(cute.make_layout(config.tile_m * config.block_keys))
        peer = None
        if config.ctas > 1:
            layout = self.peer_layout(kind)
            peer = storage.v.get_tensor(layout.outer, swizzle=layout.inner)[None, None, 0]
        return Shared(
            storage.q.get_tensor(q.outer, swizzle=q.inner),
            one(storage.k, k),
            one(storage.v, v),
            storage.dout.get_tensor(dout.outer, swizzle=dout.inner),
            storage.ds.get_tensor(ds.outer, swizzle=ds.inner),
            shown,
            storage.lse2.get_tensor(cute.make_layout((config.tile_m, config.q_stages))),
            storage.delta.get_tensor(cute.make_layout((config.tile_m, config.do_stages))),
            storage.dq.get_tensor(cute.make_layout((config.dq_room, config.dq_parts, config.dq_stages))),
            peer,
        )

    def pipes(self, storage: Any, shared: Shared) -> Pipes:
        thread, at = pipeline.Agent.Thread, mbarriers(self.barriers, storage)

        def ring(name: str, tensor: cute.Tensor) -> pipeline.PipelineTmaAsync:
            stage = cute.select(tensor.layout, mode=[0, 1])
            rows, freed = 4 * self.config.tile_m, self.barriers[f"{name}_empty"].arrivals
            return pipeline.PipelineTmaAsync.create(
                num_stages=cute.size(tensor, mode=[2]),
                producer_group=pipeline.CooperativeGroup(thread),
                consumer_group=pipeline.CooperativeGroup(thread, freed),
                tx_count=cute.size_in_bytes(tensor.element_type, stage) + rows,
                barrier_storage=at[f"{name}_full"],
                defer_sync=True,
            )

        return pipes_of(
            at,
            q=ring("q", shared.q),
            dout=ring("dout", shared.dout),
            next=NextTile(storage.next.get_tensor(cute.make_layout(1)), at["next_full"], at["next_empty"]),
        )


def store_of(gradient: cute.Tensor, shape: tuple[int, int]) -> cpasync.TmaInfo:
    """Descriptor of a gradient (S, D, ...), of which (rows, columns) leave shared memory together."""
    rows, columns = shape
    layout = swizzled_rows(gradient.element_type, (rows, columns, 1), swizzle(columns, columns))
    tile = cute.slice_(layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), gradient, tile, shape)
