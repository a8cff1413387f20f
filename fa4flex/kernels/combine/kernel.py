"""Merges what splits of the keys leave: outputs are weighted by their share of the whole sum of exponentials.

A block has one row, or where there are many, one after the other. Its warps take the splits in turn, and add
up in shared memory. Time is that of a few loads one after the other: outputs are asked for before it is known
which of them count. The kernel may be launched before the splits are done, and waits for them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, const_expr, cute, select_
from cutlass.memory import SmemAllocator

from fa4flex.kernels.combine.sums import BATCH, Batch, largest_of_lanes
from fa4flex.kernels.combine.workspace import Parts, parts_of, rows_of
from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.even_batches import splits_of
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.pointwise import apply_output, row_channels
from fa4flex.kernels.common.softmax import LOG2_E, entropy_of, finish_row, finite, logit_of
from fa4flex.kernels.common.tile_scheduler import place
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.plan.arguments import FORWARD, MERGE

WARPS = 4
THREADS = 32 * WARPS

BLOCKS = 2048
"""Blocks of a launch, at most: about as many as a chip has room for at once. Where the keys of a batch turn
out not to be split, each of them has nothing to do, which takes time as well."""

MOST_AT_ONCE = 256
"""Columns of an output, at most, of which a warp has registers for BATCH parts; of wider ones, for half."""

_FIELDS = FORWARD.read_by(MERGE)
_OF_OUTPUT = "operands", "scalars", "scale"


class CombineArguments(tuple[Any, ...]):
    """Named tuples: out [B, S, H, D]; lse and entropy [B, H, S], or None; seqused_q, seqused_k and used_keys
    [B], sinks [H], or None; workspace: see workspace.py. With an output function also what hooks are called
    with."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@lru_cache
def combine_arguments(output: bool) -> type[CombineArguments]:
    """The class of the arguments; output: whether there is an output function."""
    more = tuple([name for name in _OF_OUTPUT if name not in _FIELDS]) if output else ()
    fields = named("CombineArguments", (*_FIELDS, *more))
    return type("CombineArguments", (fields, CombineArguments), {})


class Row(NamedTuple):
    """Place of a merged row: its output (width), element `q` of the log-sum-exps of a head, or None;
    the sink of its head, or None; the arguments of an output function, or None; and the entropies of a head,
    or None."""

    out: cute.Tensor
    lse: cute.Tensor | None
    q: Int32
    sink: Float32 | None
    at: At | None = None
    entropies: cute.Tensor | None = None


class Sums(NamedTuple):
    """Shared memory for each warp's sums: of outputs (warp, width), and of weights (warp)."""

    outputs: cute.Tensor
    totals: cute.Tensor


class Combine:
    """`width` is D, a multiple of 8. A lane adds up `together` columns next to each other, `pieces` times, of
    `batch` parts at once. `hooks`: those of the variant. Outputs of elementwise weights are added: splits
    with keys have sums of 1, whose logarithm is 0."""

    def __init__(self, width: int, hooks: Hooks = Hooks()) -> None:
        self.width = width
        self.hooks = hooks
        self.together = 4 if width > 64 else 2
        self.pieces = -(-width // (32 * self.together))
        self.batch = BATCH if width <= MOST_AT_ONCE else BATCH // 2

    @cute.jit
    def __call__(self, arguments: CombineArguments, stream: cuda.CUstream) -> None:
        if arguments.splits > 1:
            blocks = cutlass.min(rows_of(arguments), BLOCKS)
            self.device(arguments).launch(
                grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
            )

    @cute.kernel
    def device(self, arguments: CombineArguments) -> None:
        sums = self.room()
        splits = splits_of(arguments)
        cute.arch.griddepcontrol_wait()
        # A single split has left the output itself.
        if splits > 1:
            first, every = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            for number in cutlass.range(first, rows_of(arguments), every, unroll=1):
                if number > first:
                    cute.arch.barrier()
                self.row(arguments, number, splits, sums)

    @cute.jit
    def row(self, arguments: CombineArguments, number: Int32, splits: Int32, sums: Sums) -> None:
        """Row `number` of all, if its sequence has it."""
        _, length, heads, _ = arguments.out.shape
        b, h, q = number // (heads * length), number // length % heads, number % length
        q_len = Int32(length)
        if const_expr(arguments.seqused_q is not None):
            q_len = Int32(arguments.seqused_q[b])
        if q < q_len:
            lse = None
            if const_expr(arguments.lse is not None):
                lse = arguments.lse[b, h, None]
            at = None
            if const_expr(self.hooks.output is not None):
                # An output function knows no keys. What other hooks share may be a quotient by their number,
                # which must not be a constant 0.
                zero = Int32(0)
                work = Work(zero, Int32(h), Int32(b), zero, zero, q_len, q_len, Boolean(True))
                at = self.place(arguments, work, Int32(heads))
            entropies = None
            if const_expr(arguments.entropy is not None):
                entropies = arguments.entropy[b, h, None]
            row = Row(
                arguments.out[b, q, h, None], lse, Int32(q), logit_of(self.hooks, arguments, h), at, entropies
            )
            self.merge(parts_of(arguments, number, splits), row, cute.arch.thread_idx()[0], sums)

    def place(self, arguments: Any, work: Work, heads: Int32) -> At:
        """Arguments of the output function for a head of a sequence."""
        return place(self.hooks, work, heads, arguments)

    def room(self) -> Sums:
        return Sums(
            SmemAllocator().allocate_tensor(
                Float32, cute.make_layout((WARPS, self.width), stride=(self.width, 1)), 16
            ),
            SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16),
        )

    @cute.jit
    def merge(self, parts: Parts, row: Row, thread: Int32, sums: Sums) -> None:
        """A block's: one row."""
        warp, lane = thread // 32, thread % 32
        begun = Batch.of(self.together, self.pieces, self.batch)
        self.load(parts, warp, lane, begun)
        largest = self.largest(parts, lane)
        self.gather(parts, thread, largest, begun, sums)
        cute.arch.barrier()
        self.write(row, thread, largest, sums)
        if const_expr(row.entropies is not None):
            self.write_entropy(parts, row, thread, largest, sums.totals)

    @cute.jit
    def write_entropy(
        self, parts: Parts, row: Row, thread: Int32, largest: Float32, totals: cute.Tensor
    ) -> None:
        """The entropy of a row, by its block's first warp: of a split, its weight times (log-sum-exp -
        entropy) is its part in the moment, in nats."""
        shift, moment = finite(largest), Float32(0.0)
        if thread < 32:
            for split in cutlass.range(thread, parts.count, 32, unroll=1):
                log = parts.log_sums[split] - shift
                weight = cute.math.exp2(log * LOG2_E, fastmath=True)
                entropies: Any = parts.entropies
                moment = moment + select_(weight > 0, weight * (log - entropies[split]), Float32(0.0))
            for distance in cutlass.range_constexpr(5):
                moment = moment + cute.arch.shuffle_sync_bfly(moment, offset=1 << distance)
            if thread == 0:
                total = (totals[0] + totals[1]) + (totals[2] + totals[3])
                sums = total, moment * LOG2_E
                of_head: Any = row.entropies
                of_head[row.q] = entropy_of(largest == -Float32.inf, shift * LOG2_E, sums, row.sink)

    @cute.jit
    def load(self, parts: Parts, first: Int32, lane: Int32, batch: cutlass.Constexpr[Batch]) -> None:
        """Splits `first`, and every WARPS-th after it; past the last, nothing is read: mostly there are fewer
        than there is room for."""
        for i in cutlass.range_constexpr(self.batch):
            split = first + WARPS * i
            batch.log_sums[i] = -Float32.inf
            if split < parts.count:
                batch.log_sums[i] = parts.log_sums[split]
                row = cute.logical_divide(parts.outputs[split, None], cute.make_layout(self.together))
                for piece in cutlass.range_constexpr(self.pieces):
                    place = cutlass.min(piece * 32 + lane, self.width // self.together - 1)
                    cute.autovec_copy(row[None, place], batch.outputs[None, piece, i])

    @cute.jit
    def largest(self, parts: Parts, lane: Int32) -> Float32:
        """The largest log-sum-exp of a row, found by each warp."""
        largest = -Float32.inf
        for split in cutlass.range(lane, parts.count, 32, unroll=1):
            largest = cute.arch.fmax(largest, parts.log_sums[split])
        return largest_of_lanes(largest)

    @cute.jit
    def gather(
        self,
        parts: Parts,
        thread: Int32,
        largest: Float32,
        begun: cutlass.Constexpr[Batch],
        sums: Sums,
    ) -> None:
        """The weighted sum of a warp's splits."""
        warp, lane = thread // 32, thread % 32
        shift = finite(largest)
        mine = cute.make_rmem_tensor((self.together, self.pieces), Float32)
        mine.fill(0.0)
        total = begun.add(shift, mine, Float32(0.0))
        every = WARPS * self.batch
        for first in cutlass.range(warp + every, parts.count, every, unroll=1):
            batch = Batch.of(self.together, self.pieces, self.batch)
            self.load(parts, first, lane, batch)
            total = batch.add(shift, mine, total)
        target = cute.logical_divide(sums.outputs[warp, None], cute.make_layout(self.together))
        for piece in cutlass.range_constexpr(self.pieces):
            place = piece * 32 + lane
            if place * self.together < self.width:
                cute.autovec_copy(mine[None, piece], target[None, place])
        if lane == 0:
            sums.totals[warp] = total

    @cute.jit
    def write(self, row: Row, thread: Int32, largest: Float32, sums: Sums) -> None:
        """The row, two columns by each thread at a time, and its log-sum-exp."""
        columns, totals = sums.outputs, sums.totals
        total = (totals[0] + totals[1]) + (totals[2] + totals[3])
        if const_expr(self.hooks.elementwise):
            scale, lse = Float32(1.0), Float32(0.0)
        else:
            scale, lse = finish_row(largest, finite(largest) * LOG2_E, total, row.sink)
        if const_expr(row.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if thread == 0:
                row.lse[row.q] = lse
        pairs = cute.logical_divide(row.out, cute.make_layout(2))
        for first in cutlass.range_constexpr(0, self.width // 2, THREADS):
            self.write_pair(row, pairs, thread + first if first else thread, scale, columns)

    @cute.jit
    def write_pair(
        self, row: Row, pairs: cute.Tensor, number: Int32, scale: Float32, columns: cute.Tensor
    ) -> None:
        """Two columns next to each other."""
        kind = row.out.element_type
        if 2 * number < self.width:
            pair = cute.make_rmem_tensor((2,), kind)
            if const_expr(row.at is None):
                for i in cutlass.range_constexpr(2):
                    column = 2 * number + i
                    total = (columns[0, column] + columns[1, column]) + (
                        columns[2, column] + columns[3, column]
                    )
                    pair[i] = (total * scale).to(kind)
            else:
                values = cute.make_rmem_tensor((1, 2), Float32)
                for i in cutlass.range_constexpr(2):
                    column = 2 * number + i
                    total = (columns[0, column] + columns[1, column]) + (
                        columns[2, column] + columns[3, column]
                    )
                    values[0, i] = total * scale
                at: Any = row.at
                apply_output(self.hooks, row_channels(at, row.q, 2 * number, 2), values, self.width)
                for i in cutlass.range_constexpr(2):
                    pair[i] = values[0, i].to(kind)
            cute.autovec_copy(pair, pairs[None, number])
