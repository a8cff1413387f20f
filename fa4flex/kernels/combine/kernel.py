"""Merges what splits of the keys leave: outputs are weighted by their share of the whole sum of exponentials.

A warp has a row of few splits, or where there are many rows, one after the other. Of more splits, a block
has it: its warps take them in turn, and add up in shared memory. Time is that of a few loads one
after the other: outputs are asked for before it is known which of them count. The kernel may be launched
before the splits are done, and waits for them.
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
from fa4flex.kernels.plan.target import ALL_SHARED

WARPS = 4
THREADS = 32 * WARPS

BLOCKS = 2048
"""Blocks of a launch, at most: about as many as a chip has room for at once. Where the keys of a batch turn
out not to be split, each of them has nothing to do, which takes time as well."""

RESIDENT = 4, 2
"""Blocks that a multiprocessor has room for, at least, of outputs of which a lane has one piece, and of wider
ones: what they wait for is memory, so that the more of them there are, the better."""

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
    `batch` parts at once, or of `few` where a warp has a row. `hooks`: those of the variant. Outputs of
    elementwise weights are added: splits with keys have sums of 1, whose logarithm is 0."""

    def __init__(self, width: int, hooks: Hooks = Hooks()) -> None:
        self.width = width
        self.hooks = hooks
        self.together = 4 if width > 64 else 2
        self.pieces = -(-width // (32 * self.together))
        self.batch = BATCH if width <= MOST_AT_ONCE else BATCH // 2
        self.few = self.batch // 2

    @cute.jit
    def __call__(self, arguments: CombineArguments, stream: cuda.CUstream) -> None:
        if arguments.splits > 1:
            rows = rows_of(arguments)
            if arguments.splits <= self.few:
                rows = (rows + WARPS - 1) // WARPS
            blocks = cutlass.min(rows, BLOCKS)
            self.device(arguments).launch(
                grid=[blocks, 1, 1],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
                min_blocks_per_mp=RESIDENT[self.pieces > 1],
                # As in the kernel before, so that nothing waits for a change.
                preferred_smem_carveout=ALL_SHARED,
            )

    @cute.kernel
    def device(self, arguments: CombineArguments) -> None:
        sums = self.room()
        splits = splits_of(arguments)
        cute.arch.griddepcontrol_wait()
        # A single split has left the output itself.
        if splits > 1:
            first, every = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            if splits <= self.few:
                # The same in all lanes, so that rows are found by one.
                warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
                for number in cutlass.range(
                    WARPS * first + warp, rows_of(arguments), WARPS * every, unroll=1
                ):
                    self.row(arguments, number, splits, None)
            else:
                for number in cutlass.range(first, rows_of(arguments), every, unroll=1):
                    if number > first:
                        cute.arch.barrier()
                    self.row(arguments, number, splits, sums)

    @cute.jit
    def row(
        self, arguments: CombineArguments, number: Int32, splits: Int32, sums: cutlass.Constexpr[Sums | None]
    ) -> None:
        """Row `number` of all, if its sequence has it: a block's, which adds up in `sums`, or a warp's."""
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
            parts, thread = parts_of(arguments, number, splits), cute.arch.thread_idx()[0]
            if const_expr(sums is None):
                self.merge_alone(parts, row, thread % 32)
            else:
                self.merge(parts, row, thread, sums)

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
        self.load(parts, warp, WARPS, lane, begun)
        largest = self.largest(parts, lane)
        self.gather(parts, thread, largest, begun, sums)
        cute.arch.barrier()
        totals = sums.totals
        total = (totals[0] + totals[1]) + (totals[2] + totals[3])
        scale = self.finish(row, thread, largest, total)
        columns, pairs = sums.outputs, cute.logical_divide(row.out, cute.make_layout(2))
        for first in cutlass.range_constexpr(0, self.width // 2, THREADS):
            self.write_pair(row, pairs, thread + first if first else thread, scale, columns)
        if const_expr(row.entropies is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if thread < 32:
                self.write_entropy(parts, row, thread, largest, total)

    @cute.jit
    def merge_alone(self, parts: Parts, row: Row, lane: Int32) -> None:
        """A warp's: one row, of few splits."""
        batch = Batch.of(self.together, self.pieces, self.few)
        self.load(parts, Int32(0), 1, lane, batch)
        largest = self.largest(parts, lane)
        mine = cute.make_rmem_tensor((self.together, self.pieces), Float32)
        mine.fill(0.0)
        total = batch.add(finite(largest), mine, Float32(0.0))
        scale = self.finish(row, lane, largest, total)
        out = cute.logical_divide(row.out, cute.make_layout(self.together))
        for piece in cutlass.range_constexpr(self.pieces):
            place = piece * 32 + lane
            if place * self.together < self.width:
                self.write_columns(row, out[None, place], place * self.together, scale, mine[None, piece])
        if const_expr(row.entropies is not None):
            self.write_entropy(parts, row, lane, largest, total)

    @cute.jit
    def load(
        self,
        parts: Parts,
        first: Int32,
        every: cutlass.Constexpr[int],
        lane: Int32,
        batch: cutlass.Constexpr[Batch],
    ) -> None:
        """Splits from `first` on, `every` so many; past the last, nothing is read: mostly there are fewer
        than there is room for."""
        for i in cutlass.range_constexpr(batch.parts):
            split = first + every * i
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
            self.load(parts, first, WARPS, lane, batch)
            total = batch.add(shift, mine, total)
        target = cute.logical_divide(sums.outputs[warp, None], cute.make_layout(self.together))
        for piece in cutlass.range_constexpr(self.pieces):
            place = piece * 32 + lane
            if place * self.together < self.width:
                cute.autovec_copy(mine[None, piece], target[None, place])
        if lane == 0:
            sums.totals[warp] = total

    @cute.jit
    def finish(self, row: Row, thread: Int32, largest: Float32, total: Float32) -> Float32:
        """Number that sums of outputs are multiplied by; thread 0 writes the log-sum-exp."""
        if const_expr(self.hooks.elementwise):
            scale, lse = Float32(1.0), Float32(0.0)
        else:
            scale, lse = finish_row(largest, finite(largest) * LOG2_E, total, row.sink)
        if const_expr(row.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if thread == 0:
                row.lse[row.q] = lse
        return scale

    @cute.jit
    def write_pair(
        self, row: Row, pairs: cute.Tensor, number: Int32, scale: Float32, columns: cute.Tensor
    ) -> None:
        """Two columns next to each other, of what warps have added up."""
        if 2 * number < self.width:
            sums = cute.make_rmem_tensor((2,), Float32)
            for i in cutlass.range_constexpr(2):
                column = 2 * number + i
                sums[i] = (columns[0, column] + columns[1, column]) + (
                    columns[2, column] + columns[3, column]
                )
            self.write_columns(row, pairs[None, number], 2 * number, scale, sums)

    @cute.jit
    def write_columns(
        self, row: Row, target: cute.Tensor, first: Int32, scale: Float32, sums: cute.Tensor
    ) -> None:
        """Columns next to each other, from `first` on."""
        count = cute.size(sums)
        values = cute.make_rmem_tensor((1, count), Float32)
        for i in cutlass.range_constexpr(count):
            values[0, i] = sums[i] * scale
        if const_expr(row.at is not None):
            at: Any = row.at
            apply_output(self.hooks, row_channels(at, row.q, first, count), values, self.width)
        found = cute.make_rmem_tensor((count,), row.out.element_type)
        for i in cutlass.range_constexpr(count):
            found[i] = values[0, i].to(row.out.element_type)
        cute.autovec_copy(found, target)

    @cute.jit
    def write_entropy(self, parts: Parts, row: Row, lane: Int32, largest: Float32, total: Float32) -> None:
        """The entropy of a row, by one warp: of a split, its weight times (log-sum-exp - entropy) is its part
        in the moment, in nats."""
        shift, moment = finite(largest), Float32(0.0)
        for split in cutlass.range(lane, parts.count, 32, unroll=1):
            log = parts.log_sums[split] - shift
            weight = cute.math.exp2(log * LOG2_E, fastmath=True)
            entropies: Any = parts.entropies
            moment = moment + select_(weight > 0, weight * (log - entropies[split]), Float32(0.0))
        for distance in cutlass.range_constexpr(5):
            moment = moment + cute.arch.shuffle_sync_bfly(moment, offset=1 << distance)
        if lane == 0:
            of_head: Any = row.entropies
            of_head[row.q] = entropy_of(
                largest == -Float32.inf, shift * LOG2_E, (total, moment * LOG2_E), row.sink
            )
