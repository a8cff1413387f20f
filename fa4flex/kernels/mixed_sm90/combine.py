"""Merges what parts of the keys of sequences with few rows leave, where the schedule says how long they are:
the kernel of `combine`, for rows that are found from the lengths of sequences. Other parts are merged by the
warp that ends the last one (merging.py)."""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Int32, Int64, const_expr, cute

from fa4flex.kernels.combine import kernel as combine
from fa4flex.kernels.combine.kernel import THREADS, Row
from fa4flex.kernels.combine.workspace import Parts
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.softmax import sink_of
from fa4flex.kernels.mixed_sm90.sequences import Sequences, log_sums, outputs, start
from fa4flex.kernels.plan.target import ALL_SHARED

RESIDENT = 4
"""Blocks that a multiprocessor has room for, at least: where nothing is said, the compiler spills."""

BLOCKS = RESIDENT - 1
"""Blocks per multiprocessor: each takes row after row. Fewer than there is room for, so that all of them wait
on multiprocessors which the kernel before has left when its last block ends: most batches have no rows to
merge, and a block that began then would read all lengths first."""


class Combine(combine.Combine):
    """`config`: of the kernel that leaves the parts."""

    def __init__(self, width: int, config: Any) -> None:
        super().__init__(width)
        self.config = config
        self.sequences = Sequences(config)

    @cute.jit
    def __call__(self, arguments: Arguments, stream: cuda.CUstream) -> None:
        if const_expr(self.config.share is not None) and arguments.splits > 1:
            most = self.config.workers * BLOCKS
            tokens, heads, _ = arguments.q.shape
            blocks = cutlass.min(cutlass.min(tokens, most) * cutlass.min(heads, most), most)
            self.device(arguments).launch(
                grid=[blocks, 1, 1],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
                min_blocks_per_mp=RESIDENT,
                preferred_smem_carveout=ALL_SHARED,
            )

    @cute.kernel
    def device(self, arguments: Arguments) -> None:
        thread = cute.arch.thread_idx()[0]
        heads, group = Int32(arguments.k.shape[2]), self.sequences.group(arguments)
        sums = self.room()
        # Lengths were there before the kernel that leaves the parts began.
        totals = self.sequences.totals(arguments)
        at = start()
        cute.arch.griddepcontrol_wait()
        for number in cutlass.range(
            cute.arch.block_idx()[0], totals.merged * heads, cute.arch.grid_dim()[0], unroll=1
        ):
            within, at = self.sequences.find(number // heads, at, arguments, totals.share, "merged")
            parts, rows = self.sequences.parts(at.b, arguments, totals.share)
            kv_head = number % heads
            h, q = kv_head * group + within % group, arguments.cu_seqlens_q[at.b] + within // group
            first = at.rows * heads + kv_head * parts * rows + within
            lse = None
            if const_expr(arguments.lse is not None):
                lse = arguments.lse[h, None]
            row = Row(arguments.out[q, h, None], lse, q, sink_of(arguments, h))
            self.merge(_parts(arguments, first, parts, rows), row, thread, sums)
            cute.arch.barrier()  # sums are read


def _parts(arguments: Arguments, first: Int32, parts: Int32, rows: Int32) -> Parts:
    """Row `first` and every rows-th after it."""
    width = arguments.v.shape[3]
    step, before = (cute.assume(Int64(n) * width, divby=8) for n in (rows, first))
    return Parts(
        cute.make_tensor(log_sums(arguments).iterator + first, cute.make_layout(parts, stride=rows)),
        cute.make_tensor(
            outputs(arguments).iterator + before, cute.make_layout((parts, width), stride=(step, 1))
        ),
        parts,
    )
