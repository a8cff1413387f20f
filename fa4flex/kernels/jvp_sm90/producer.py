"""The producer warp: brings queries, keys and values with their tangents into shared memory, by TMA. A tile
and its tangent have one stage of a ring, and one barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.key_values import KeyValues
from fa4flex.kernels.common.transfer import Ring, Views, load_stage, partition, sequence
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_sm90 import producer as forward
from fa4flex.kernels.fwd_sm90.producer import Block
from fa4flex.kernels.fwd_sm90.resources import Turn
from fa4flex.kernels.jvp_sm90.config import Config
from fa4flex.kernels.jvp_sm90.resources import Shared, Transfers


@dataclass(frozen=True)
class Moving:
    """KeyValues with tangents: views of k, v and, None for what has none, of their tangents."""

    transfers: Transfers
    k_ring: Ring
    v_ring: Ring
    k: Views
    v: Views
    tk: Views | None
    tv: Views | None

    def turn_to(self, number: Int32) -> None:
        pass

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        load_stage(self.transfers.k, self.k_ring, state, self.k, tile)
        load_beside(self.transfers.tk, self.k_ring, state, self.tk, tile)

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        load_stage(self.transfers.v, self.v_ring, state, self.v, tile)
        load_beside(self.transfers.tv, self.v_ring, state, self.tv, tile)


def load_beside(
    transfer: Any, ring: Ring, state: pipeline.PipelineState, views: Views | None, tile: Int32
) -> None:
    """Copy a tangent's tile into a stage that has been acquired, if there is one: the barrier counts its
    bytes, too."""
    if views is not None:
        to_shared, from_global = views
        cute.copy(
            transfer.atom,
            from_global[None, tile],
            to_shared[None, state.index],
            tma_bar_ptr=ring.producer_get_barrier(state),
        )


class Producer(forward.Producer):
    config: Config

    def contiguous(self, work: Work, kv_head: Int32, arguments: Arguments, block: Block) -> KeyValues:
        transfers: Any = block.transfers
        shared: Any = block.shared
        pipes = block.pipes
        keys = (
            self._keys(transfer, tile, work, kv_head)
            for transfer, tile in ((transfers.k, shared.k), (transfers.tk, shared.tk))
        )
        values = (
            self._values(transfer, tile, work, kv_head)
            for transfer, tile in ((transfers.v, shared.v), (transfers.tv, shared.tv))
        )
        (k, tk), (v, tv) = keys, values
        assert k is not None and v is not None
        return Moving(transfers, pipes.k, pipes.v, k, v, tk, tv)

    def _keys(self, transfer: Any, tile: Any, work: Work, kv_head: Int32) -> Views | None:
        if transfer is None:
            return None
        one = sequence(transfer.tma_tensor, work.kv_offset, kv_head, work.b)
        tiles = cute.local_tile(one, (self.config.tile_n, self.config.head_dim), (None, 0))
        return partition(transfer, tile, tiles)

    def _values(self, transfer: Any, tile: Any, work: Work, kv_head: Int32) -> Views | None:
        if transfer is None:
            return None
        one = sequence(transfer.tma_tensor, work.kv_offset, kv_head, work.b, axis=1)
        tiles = cute.local_tile(one, (self.config.head_dim_v, self.config.tile_n), (0, None))
        return partition(transfer, tile, tiles)

    @cute.jit
    def queries(
        self,
        work: Work,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        turn: cutlass.Constexpr[Turn],
    ) -> None:
        """Each warpgroup's 64 rows and their tangents, as soon as it has let go of those before."""
        width = self.config.head_dim
        q_to, q_from = partition(transfers.q, shared.q, self.rows.tiles(transfers.q, work, width))
        size = cute.size_in_bytes(shared.q.element_type, cute.select(shared.q.layout, mode=[0, 1]))
        for group in cutlass.range_constexpr(self.config.consumers):
            place = self.ring.place(group, turn)
            tile = work.tile * self.config.consumers + group
            full = pipes.q_full + place
            cute.arch.mbarrier_wait(pipes.q_empty + place, turn.phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size * (1 + ("q" in self.config.moved)))
            cute.copy(transfers.q.atom, q_from[None, tile], q_to[None, place], tma_bar_ptr=full)
            if const_expr(transfers.tq is not None):
                t_to, t_from = partition(transfers.tq, shared.tq, self.rows.tiles(transfers.tq, work, width))
                cute.copy(transfers.tq.atom, t_from[None, tile], t_to[None, place], tma_bar_ptr=full)
