"""Merges what splits of the keys leave: outputs are weighted by their share of the whole sum of exponentials.

A block has one row. Its warps take the splits in turn, and add up in shared memory. Time is that of a few
loads one after the other: outputs are asked for before it is known which of them count. The kernel may be
launched before the splits are done, and waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, select_
from cutlass.memory import SmemAllocator

from fa4flex.codegen.plan.arguments import FORWARD, MERGE
from fa4flex.kernels.combine.workspace import log_sums, outputs, rows_of
from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.softmax import LOG2_E, alone, finish, running

WARPS = 4
THREADS = 32 * WARPS

BATCH = 8
"""Splits that a warp loads at once: most calls have no more than all warps together."""

_Arguments: Any = named("CombineArguments", FORWARD.read_by(MERGE))


class CombineArguments(_Arguments):
    """out [B, S, H, D]; lse [B, H, S], or None; seqused_q int32 [B], sinks [H], or None; workspace: see
    workspace.py."""


@dataclass(frozen=True)
class Batch:
    """Log-sum-exps of some splits, and a lane's columns of their outputs."""

    log_sums: cute.Tensor
    outputs: cute.Tensor


class Combine:
    """`width` is D, a multiple of 8. A lane adds up `together` columns next to each other, `pieces` times."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.together = 4 if width > 64 else 2
        self.pieces = -(-width // (32 * self.together))

    @cute.jit
    def __call__(self, arguments: CombineArguments, stream: cuda.CUstream) -> None:
        if arguments.splits > 1:
            self.device(arguments).launch(
                grid=[rows_of(arguments), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
            )

    @cute.kernel
    def device(self, arguments: CombineArguments) -> None:
        number, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        _, length, heads, _ = arguments.out.shape
        b, h, q = number // (heads * length), number // length % heads, number % length
        sums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((WARPS, self.width), stride=(self.width, 1)), 16
        )
        totals = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
        q_len = Int32(length)
        if const_expr(arguments.seqused_q is not None):
            q_len = Int32(arguments.seqused_q[b])
        cute.arch.griddepcontrol_wait()
        if q < q_len:
            warp, lane = thread // 32, thread % 32
            begun = self.batch()
            self.load(arguments, number, warp, lane, begun)
            largest = self.largest(arguments, number, lane)
            self.gather(arguments, number, thread, largest, begun, (sums, totals))
            cute.arch.barrier()
            self.write(arguments, (b, h, q), thread, largest, (sums, totals))

    def batch(self) -> Batch:
        """Room for as many splits as a warp loads at once."""
        outputs = cute.make_rmem_tensor((self.together, self.pieces, BATCH), Float32)
        return Batch(cute.make_rmem_tensor((BATCH,), Float32), outputs)

    @cute.jit
    def load(
        self,
        arguments: CombineArguments,
        number: Int32,
        first: Int32,
        lane: Int32,
        batch: cutlass.Constexpr[Batch],
    ) -> None:
        """Splits `first`, and every WARPS-th after it; past the last, its output, and no sum."""
        lses, parts = log_sums(arguments), outputs(arguments)
        for i in cutlass.range_constexpr(BATCH):
            split = first + WARPS * i
            kept = cutlass.min(split, arguments.splits - 1)
            batch.log_sums[i] = select_(split < arguments.splits, lses[kept, number], -Float32.inf)
            row = cute.logical_divide(parts[kept, number, None], cute.make_layout(self.together))
            for piece in cutlass.range_constexpr(self.pieces):
                place = cutlass.min(piece * 32 + lane, self.width // self.together - 1)
                cute.autovec_copy(row[None, place], batch.outputs[None, piece, i])

    @cute.jit
    def largest(self, arguments: CombineArguments, number: Int32, lane: Int32) -> Float32:
        """The largest log-sum-exp of a row, found by each warp."""
        lses = log_sums(arguments)
        largest = -Float32.inf
        for split in cutlass.range(lane, arguments.splits, 32, unroll=1):
            largest = cute.arch.fmax(largest, lses[split, number])
        for distance in cutlass.range_constexpr(5):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << distance))
        return largest

    @cute.jit
    def gather(
        self,
        arguments: CombineArguments,
        number: Int32,
        thread: Int32,
        largest: Float32,
        begun: cutlass.Constexpr[Batch],
        into: tuple[cute.Tensor, cute.Tensor],
    ) -> None:
        """The weighted sum of a warp's splits."""
        sums, totals = into
        warp, lane = thread // 32, thread % 32
        shift = select_(largest == -Float32.inf, Float32(0.0), largest)
        mine = cute.make_rmem_tensor((self.together, self.pieces), Float32)
        mine.fill(0.0)
        total = self.add(begun, shift, mine, Float32(0.0))
        for first in cutlass.range(warp + WARPS * BATCH, arguments.splits, WARPS * BATCH, unroll=1):
            batch = self.batch()
            self.load(arguments, number, first, lane, batch)
            total = self.add(batch, shift, mine, total)
        target = cute.logical_divide(sums[warp, None], cute.make_layout(self.together))
        for piece in cutlass.range_constexpr(self.pieces):
            place = piece * 32 + lane
            if place * self.together < self.width:
                cute.autovec_copy(mine[None, piece], target[None, place])
        if lane == 0:
            totals[warp] = total

    def add(self, batch: Batch, shift: Float32, mine: cute.Tensor, total: Float32) -> Float32:
        """Add a batch to a warp's sums; returns the sum of its weights and `total`."""
        for i in range(BATCH):
            weight = cute.math.exp2((batch.log_sums[i] - shift) * LOG2_E, fastmath=True)
            total = total + weight
            for piece in range(self.pieces):
                for j in range(self.together):
                    # A split without keys has written no output.
                    more = select_(weight > 0, batch.outputs[j, piece, i] * weight, Float32(0.0))
                    mine[j, piece] = mine[j, piece] + more
        return total

    @cute.jit
    def write(
        self,
        arguments: CombineArguments,
        at: tuple[Int32, Int32, Int32],
        thread: Int32,
        largest: Float32,
        found: tuple[cute.Tensor, cute.Tensor],
    ) -> None:
        """Two columns of the row by each thread, and its log-sum-exp."""
        b, h, q = at
        sums, totals = found
        sink = None
        if const_expr(arguments.sinks is not None):
            sink = arguments.sinks[h].to(Float32)
        state = running(1)
        state.largest[0] = largest
        state.shift[0] = select_(largest == -Float32.inf, Float32(0.0), largest) * LOG2_E
        state.total[0] = (totals[0] + totals[1]) + (totals[2] + totals[3])
        scales, lses = finish(state, sink, alone)
        if const_expr(arguments.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if thread == 0:
                arguments.lse[b, h, q] = lses[0]
        pairs = cute.logical_divide(arguments.out[b, q, h, None], cute.make_layout(2))
        kind = arguments.out.element_type
        if 2 * thread < self.width:
            pair = cute.make_rmem_tensor((2,), kind)
            for i in cutlass.range_constexpr(2):
                column = 2 * thread + i
                total = (sums[0, column] + sums[1, column]) + (sums[2, column] + sums[3, column])
                pair[i] = (total * scales[0]).to(kind)
            cute.autovec_copy(pair, pairs[None, thread])
