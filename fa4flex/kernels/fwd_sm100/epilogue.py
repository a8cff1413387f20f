"""The warp that stores finished outputs from shared to global memory by TMA, which clips what is past the
end."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import Transfers, partition, sequence
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm100.config import ROWS, Config
from fa4flex.kernels.fwd_sm100.resources import Shared, chunk_columns, first_row


class Epilogue:
    def __init__(self, config: Config, scheduler: TileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        columns = chunk_columns(self.config, arguments.out.element_type)
        chunks = self.config.head_dim_v // columns

        @cute.jit
        def store(work: Work, phase: Int32, count: Int32) -> Int32:
            """count: chunks that were stored before."""
            whole = sequence(transfers.out.tma_tensor, work.q_offset, work.h, work.b)
            tiles = cute.local_tile(whole, (ROWS, columns), (None, None))
            from_shared, to_global = partition(transfers.out, shared.out, tiles)
            for tile in cutlass.range_constexpr(self.config.q_tiles):
                number_of_tile = first_row(self.config, work, tile, self.cluster.rank()) // ROWS
                for chunk in cutlass.range_constexpr(chunks):
                    stage = count % self.config.out_stages
                    cute.arch.mbarrier_wait(pipes.out_full + stage, (count // self.config.out_stages) & 1)
                    cute.copy(
                        transfers.out.atom, from_shared[None, stage], to_global[None, number_of_tile, chunk]
                    )
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(pipes.out_empty + stage)
                    count = count + 1
            return count

        self.scheduler.walk(grid, arguments, pipes.next, store, Int32(0))


def store_atom(out: cute.Tensor, chunk: object, config: Config) -> cpasync.TmaInfo:
    """The transfer of one chunk."""
    operation = cpasync.CopyBulkTensorTileS2GOp()
    return cpasync.make_tiled_tma_atom(operation, out, chunk, (ROWS, chunk_columns(config, out.element_type)))
