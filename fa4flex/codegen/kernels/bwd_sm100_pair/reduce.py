"""The warpgroup that hands on each step's dQ, as in one CTA alone. Of a CTA's 64 rows, two warps have the
first half of the columns, and two the second."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.codegen.kernels.bwd_sm100 import reduce as alone
from fa4flex.codegen.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.codegen.kernels.bwd_sm100.parts import in_columns
from fa4flex.codegen.kernels.bwd_sm100.reduce import PIECE
from fa4flex.codegen.kernels.bwd_sm100_pair.config import CTAS, Config
from fa4flex.codegen.kernels.bwd_sm100_pair.parts import Pipes, Shared
from fa4flex.codegen.kernels.common.backward import (
    BackwardArguments,
    BackwardCourse,
    KeyWork,
    query_tile_at,
)
from fa4flex.codegen.kernels.common.cluster import Cluster
from fa4flex.codegen.kernels.common.tensor_core import Blocks, arrive_once


class Reduce(alone.Reduce):
    def __init__(self, config: Config, course: BackwardCourse, cluster: Cluster) -> None:
        super().__init__(config, course)
        self.cluster = cluster

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        base: cute.Pointer,
    ) -> None:
        config = self.config
        row = cute.arch.thread_idx()[0] % ROWS
        warp = cute.arch.make_warp_uniform(row // 32)
        columns = config.head_dim // 2
        whole = in_columns(base, config.memory.dq, columns)
        fragments = cute.flat_divide(whole, (ROWS, FRAGMENT))[None, None, 0, None]
        dq = Blocks.load(tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT)), fragments, row)
        group = self.course.group(arguments)
        pieces = columns // FRAGMENT
        rows = self.cluster.rank() * CTAS + warp % 2
        place = rows * 2 * pieces + warp // 2 * pieces
        phase, stage = Int32(0), Int32(0)
        for g in cutlass.range(group, unroll=1):
            h = work.kv_head * group + g
            queries = self.course.queries(work, h, arguments)
            for i in cutlass.range(queries.count, unroll=1):
                first = query_tile_at(queries, i) * 4 * 2 * pieces + place
                cute.arch.mbarrier_wait(pipes.dq_full, phase)
                phase ^= 1
                for piece in cutlass.range_constexpr(pieces):
                    part = cute.make_rmem_tensor((FRAGMENT,), Float32)
                    dq.take(piece, part)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(piece == pieces - 1):
                        arrive_once(pipes.dq_empty, first=True)
                    target = cute.local_tile(arguments.dq_sum[work.b, h, None], (PIECE,), (first + piece,))
                    self.hand_on(part, shared.dq[None, warp, stage], target)
                    stage = (stage + 1) % config.dq_stages
        cute.arch.cp_async_bulk_wait_group(0)
