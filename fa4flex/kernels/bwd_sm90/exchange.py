"""The warp of a pair of CTAs that gives and takes what the other one has: it sends dS' there, and brings
columns of its keys."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from fa4flex.kernels.bwd_sm90.config import Config
from fa4flex.kernels.bwd_sm90.resources import Shared, keys_of
from fa4flex.kernels.bwd_sm90.roles import DS_FREE, DS_SHARED, SHARES
from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyGrid, KeyWork
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.transfer import Views, copy_to_peer, load_once, partition


class Exchange:
    def __init__(self, config: Config, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = Cluster(config.ctas)

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        transfer: cutlass.Constexpr[Any],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        """transfer: descriptor of keys, by the columns that dQ takes here."""
        work = self.scheduler.work(self.scheduler.first(), grid, arguments)
        views = self.keys(transfer, shared, work)
        cute.arch.mbarrier_wait(pipes.v_kept, 0)
        load_once(transfer, views, pipes.k_peer_full)
        count = self.scheduler.steps(work, arguments)
        for step in cutlass.range(count, unroll=1):
            self.send(shared, pipes, Int32(step))

    def keys(self, transfer: Any, shared: Shared, work: KeyWork) -> Views:
        """Columns of the other CTA's keys, which come where V was."""
        assert shared.k_peer is not None
        rank, ctas = self.cluster.rank(), self.config.ctas
        rows, columns = self.config.block_keys, self.config.head_dim // ctas
        whole = keys_of(self.config, transfer.tma_tensor, work, work.kv_head)
        tiles = cute.local_tile(whole, (rows, columns), (None, None))
        stage = cute.append(shared.k_peer.layout, cute.make_layout(1))
        to_shared, from_global = partition(transfer, cute.make_tensor(shared.k_peer.iterator, stage), tiles)
        return to_shared[None, 0], from_global[None, work.tile * ctas + (1 - rank), rank]

    def send(self, shared: Shared, pipes: Pipes, step: Int32) -> None:
        """Sends dS' of a step, once it is there, to the other CTA, whose own of that step is expected here.
        Another may be written where it is when the one before has been copied, and read there."""
        stage, rank = step % SHARES, self.cluster.rank()
        cute.arch.mbarrier_wait(pipes.ds_empty + stage, step // SHARES % 2 ^ 1)
        arrive(DS_FREE)
        sync(DS_SHARED)
        own, there = shared.ds[None, None, stage], shared.ds[None, None, SHARES + stage]
        full, size = pipes.ds_full + stage, cute.size_in_bytes(own.element_type, own.layout)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            copy_to_peer(own.iterator, there.iterator, size, full, 1 - rank)
