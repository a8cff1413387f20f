"""Keys and values for a tile of queries: where a loader asks for tiles of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cutlass import Int32, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.transfer import Ring, Transfers, Views, load_stage, sequence
from fa4flex.kernels.common.work import Grid, Work


class KeyValues(Protocol):
    """Keys and values of one sequence and head. The caller advances states."""

    def turn_to(self, number: Int32) -> None:
        """Get ready for the keys of the tile of this number, in the order in which tiles are asked for; past
        the last one, for values that are still to come."""

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        """Start the copy of a tile of keys into the ring's next stage, once that is free."""

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        """Start the copy of a tile of values, as with keys."""


@dataclass(frozen=True)
class ContiguousKeyValues:
    """KeyValues whose tokens follow each other in memory: one TMA copy per tile, with this cache policy."""

    transfers: Transfers
    k_ring: Ring
    v_ring: Ring
    k: Views
    v: Views
    policy: int | None = None

    def turn_to(self, number: Int32) -> None:
        pass

    def load_keys(self, state: pipeline.PipelineState, tile: Int32) -> None:
        load_stage(self.transfers.k, self.k_ring, state, self.k, tile, self.policy)

    def load_values(self, state: pipeline.PipelineState, tile: Int32) -> None:
        load_stage(self.transfers.v, self.v_ring, state, self.v, tile, self.policy)


def kv_head_of(work: Work, grid: Grid, arguments: Arguments) -> Int32:
    """Head of keys and values that a tile of queries attends to."""
    if grid.divisors is not None:
        kv_head: Int32 = divmod(work.h, grid.divisors.group)[0]
        return kv_head
    return work.h // (grid.heads // kv_heads(arguments))


def tokens_of(work: Work, kv_head: Int32, transfers: Transfers) -> tuple[cute.Tensor, cute.Tensor]:
    """Keys (S, D) and values (D, S) of a head of the sequence of a tile of queries."""
    k = sequence(transfers.k.tma_tensor, work.kv_offset, kv_head, work.b)
    v = sequence(transfers.v.tma_tensor, work.kv_offset, kv_head, work.b, axis=1)
    return k, v
