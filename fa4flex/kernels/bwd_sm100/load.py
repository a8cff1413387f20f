"""The warp that brings keys and values once, then queries and output gradients with their rows' numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.bwd_sm100.config import ROWS, Config
from fa4flex.kernels.bwd_sm100.resources import Products, Shared
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyWork,
    query_tile_at,
    rows_of,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.transfer import Views, head_of, load_once, load_stage, partition


class Transfers(NamedTuple):
    """q, k, v, dout: (S, D, H, B), or packed (T, D, H); ragged ones as `ending` has them."""

    q: Any
    k: Any
    v: Any
    dout: Any


class Load:
    def __init__(self, config: Config, scheduler: BackwardTileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
    ) -> None:
        config = self.config
        q, k, v, dout = transfers
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.do_stages)
        if self.scheduler.steps(work, arguments) > 0:
            load_once(k, self.keys(k, shared.k, products.scores, products.scores_tile, work), pipes.k_full)
            load_once(v, self.keys(v, shared.v, products.dprob, products.dprob_tile, work), pipes.v_full)
        for g in cutlass.range(work.group, unroll=1):
            h = work.kv_head * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            q_rows, do_rows = (self.rows(x, work.q_offset, work.q_len, (h, work.b)) for x in (q, dout))
            q_views = self.views(q_rows, q, shared.q, products.scores, products.scores_tile)
            do_views = self.views(do_rows, dout, shared.dout, products.dprob, products.dprob_tile)
            lse2, delta = rows_of(arguments.lse2, work, h), rows_of(arguments.delta, work, h)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                load_stage(q, pipes.q, q_state, q_views, tile)
                self.numbers(lse2, shared.lse2, (pipes.lse2_full, pipes.lse2_empty), q_state, tile)
                q_state.advance()
                load_stage(dout, pipes.dout, do_state, do_views, tile)
                self.numbers(delta, shared.delta, (pipes.delta_full, pipes.delta_empty), do_state, tile)
                do_state.advance()

    def keys(self, transfer: Any, shared: cute.Tensor, product: Any, size: Any, work: KeyWork) -> Views:
        """This CTA's part of a tile of keys or values, as the first operand of a product."""
        whole = self.rows(transfer, work.kv_offset, work.kv_len, (work.kv_head, work.b))
        part = product.get_slice(self.cluster.rank())
        tiles = part.partition_A(cute.local_tile(whole, size[::2], (None, 0)))
        to_shared, from_global = partition(transfer, shared, tiles, modes=3)
        return to_shared[None, 0], from_global[None, work.tile]

    def rows(
        self, transfer: Any, offset: Int32, length: Int32, place: tuple[Int32, Int32], axis: int = 0
    ) -> cute.Tensor:
        """A head of a sequence, whose tokens follow each other along `axis`."""
        return head_of(transfer.tma_tensor, self.config.ragged, (offset, length), place, axis)

    def views(
        self,
        whole: cute.Tensor,
        transfer: Any,
        shared: cute.Tensor,
        product: Any,
        size: Any,
        axes: tuple[int | None, int | None] = (None, 0),
    ) -> Views:
        """This CTA's part of tiles, which follow each other along the axis that is None, as the second
        operand of a product."""
        tiles = cute.local_tile(whole, size[1:], axes)
        part = product.get_slice(self.cluster.rank())
        return partition(transfer, shared, part.partition_B(tiles), modes=3)

    def numbers(
        self,
        source: cute.Tensor,
        shared: cute.Tensor,
        barriers: tuple[cute.Pointer, cute.Pointer],
        state: pipeline.PipelineState,
        tile: Int32,
    ) -> None:
        """A number per row of a tile."""
        full, empty = (barrier + state.index for barrier in barriers)
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.arch.mbarrier_wait(empty, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * ROWS)
            one = cute.local_tile(source, (ROWS,), (tile,))
            cute.copy(atom, one, shared[None, state.index], mbar_ptr=full)
