"""Lengths of a ragged batch, on the device: one block makes them safe to use and says what was wrong, and
sorts the tiles of queries by their work where that is asked for. It stops early where all lengths are those
of the launch before.

All kernels of a call get these lengths and not those that were given: cumulative ones lie within the packed
tensor and never decrease, used ones lie within their sequence, so no kernel reads or writes past a tensor
whatever was given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Int32, Int64, const_expr, cute, select_
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.faults import report
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.plan.arguments import SEQUENCES
from fa4flex.kernels.sequences.config import BINS, THREADS, WARPS, Config
from fa4flex.kernels.sequences.scan import scan
from fa4flex.kernels.sequences.sort import Counted, TileSort

NONE = 0x7FFFFFFF
"""Value of a fault that is not there: the least index or number is kept."""

STARTS, DECREASES, ENDS, NEGATIVE, BEYOND, COUNT = range(6)
"""Faults of one side."""

_Arguments: Any = named("SequencesArguments", SEQUENCES.read_by("kernel"))


class SequencesArguments(_Arguments):
    """cu_seqlens_q, cu_seqlens_k [N + 1] and seqused_q, seqused_k [N], as they were given: int32 or int64 of
    any stride, None where absent. cu_q, cu_k, used_q, used_k: the same, corrected, int32.
    starts int32 [N + 1]: tiles of queries in front of each sequence; order int32 [tiles, 2]: see Arguments.
    known int64: 1 if the results of the launch before stand, and the lengths that they were made of; it is
    not read, and left as it is, unless `keeps`. q_len, kv_len: tokens of the packed tensors, or the padded
    lengths; heads: of the queries; faults: address of the table in kernels/plan/faults.py.
    """


class Side(NamedTuple):
    """Lengths of queries or of keys: given and corrected, the tokens that there are, and the least index or
    number that is wrong of each fault, in shared memory."""

    cu: cute.Tensor | None
    used: cute.Tensor | None
    safe_cu: cute.Tensor | None
    safe_used: cute.Tensor | None
    tokens: Int32
    wrong: cute.Tensor


def _saturated(x: Int64) -> Int32:
    """x, or the number next to it that is neither NONE nor minus that."""
    return Int32(cutlass.min(cutlass.max(x, Int64(1 - NONE)), Int64(NONE - 1)))


def _clamped(x: Int64, least: int, most: Int32) -> Int32:
    return Int32(cutlass.min(cutlass.max(x, Int64(least)), Int64(most)))


class Sequences:
    """`config` says which lengths there are and how wide tiles are; of the hooks it calls `spans`."""

    direction = "sequences"

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.sort = TileSort(config, hooks)

    @cute.jit
    def __call__(self, arguments: SequencesArguments, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def device(self, arguments: SequencesArguments) -> None:
        thread = cute.arch.thread_idx()[0]
        memory = SmemAllocator()
        totals = memory.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        wrong = memory.allocate_tensor(Int32, cute.make_layout((COUNT, 2)), byte_alignment=16)
        changed = memory.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        if thread < 2 * COUNT:
            wrong[thread] = Int32(NONE)
        if thread == 0:
            changed[0] = Int32(arguments.keeps == 0)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if arguments.keeps != 0:
            self.compare(arguments, changed, thread)
            cute.arch.sync_threads()
        if changed[0] != 0:
            self.make(arguments, memory, wrong, totals, thread)

    @cute.jit
    def compare(self, arguments: cutlass.Constexpr, changed: cute.Tensor, thread: Int32) -> None:
        """Note whether some length is another than the one that is known, which it takes the place of."""
        a, first = arguments, Int32(1)
        if thread == 0 and a.known[0] == 0:
            changed[0] = Int32(1)
        for x in (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k):
            if const_expr(x is not None):
                count = Int32(x.shape[0])
                for i in cutlass.range(thread, count, THREADS, unroll=1):
                    value = Int64(x[i])
                    if a.known[first + i] != value:
                        a.known[first + i] = value
                        cute.arch.atomic_max(changed.iterator, Int32(1))
                first = first + count

    @cute.jit
    def make(
        self,
        arguments: cutlass.Constexpr,
        memory: cutlass.Constexpr[SmemAllocator],
        wrong: cute.Tensor,
        totals: cute.Tensor,
        thread: Int32,
    ) -> None:
        """Write all results, and report faults. Results of faulty lengths do not stand: the next launch
        reports them again."""
        sides = self.sides(arguments, wrong)
        tiles, longest = self.correct(sides, arguments.starts, totals, thread)
        cute.arch.sync_threads()
        if thread == 0:
            self.tell("q", sides[0], arguments.faults)
            self.tell("k", sides[1], arguments.faults)
            if arguments.keeps != 0:
                stands = Int64(1)
                for i in cutlass.range_constexpr(2 * COUNT):
                    stands = select_(wrong[i] == NONE, stands, Int64(0))
                arguments.known[0] = stands
        if const_expr(self.config.tile_m > 0):
            counts = memory.allocate_tensor(Int32, cute.make_layout((BINS, WARPS)), byte_alignment=16)
            self.sort.run(arguments, Counted(counts, totals), tiles, longest, thread)

    def sides(self, arguments: SequencesArguments, wrong: cute.Tensor) -> tuple[Side, Side]:
        a = arguments
        return (
            Side(a.cu_seqlens_q, a.seqused_q, a.cu_q, a.used_q, a.q_len, wrong[None, 0]),
            Side(a.cu_seqlens_k, a.seqused_k, a.cu_k, a.used_k, a.kv_len, wrong[None, 1]),
        )

    def sequences(self, sides: tuple[Side, Side]) -> Int32:
        queries, keys = sides
        if queries.cu is not None:
            return Int32(queries.cu.shape[0]) - 1
        return Int32((keys.used if queries.used is None else queries.used).shape[0])

    @cute.jit
    def correct(
        self,
        sides: cutlass.Constexpr,
        starts: cute.Tensor | None,
        totals: cute.Tensor,
        thread: Int32,
    ) -> tuple[Int32, Int32]:
        """Write the corrected lengths; returns the number of tiles and the most keys of a sequence."""
        queries, keys = sides
        count = self.sequences(sides)
        q_begun, k_begun, tiles, longest = Int32(0), Int32(0), Int32(0), Int32(0)
        for base in cutlass.range(0, count + 1, THREADS, unroll=1):
            i = base + thread
            q_len, q_begun = self.lengths(queries, i, count, q_begun, totals, thread)
            kv_len, k_begun = self.lengths(keys, i, count, k_begun, totals, thread)
            if const_expr(self.config.tile_m > 0):
                mine = cute.ceil_div(q_len, self.config.tile_m)
                upto, all_tiles = scan(mine, "sum", totals, thread)
                if i <= count:
                    starts[i] = tiles + upto - mine
                tiles = tiles + all_tiles
                _, most = scan(kv_len, "max", totals, thread)
                longest = cutlass.max(longest, most)
        return tiles, longest

    @cute.jit
    def lengths(
        self,
        side: cutlass.Constexpr,
        i: Int32,
        count: Int32,
        begun: Int32,
        totals: cute.Tensor,
        thread: Int32,
    ) -> tuple[Int32, Int32]:
        """(tokens of sequence i that take part, none past the last; where the sequences up to all of these
        threads' end). `begun`: where those before them end."""
        length, last = Int32(side.tokens), Int32(0)
        if const_expr(side.cu is not None):
            here, following = Int64(0), Int64(0)
            if i <= count:
                here = Int64(side.cu[i])
                following = Int64(side.cu[cutlass.min(i + 1, count)])
            start, last = scan(_clamped(here, 0, side.tokens), "max", totals, thread)
            start, last = cutlass.max(start, begun), cutlass.max(last, begun)
            if i <= count:
                side.safe_cu[i] = start
                self.look(side, i, count, here, following)
            length = cutlass.max(_clamped(following, 0, side.tokens) - start, Int32(0))
        if i >= count:
            length = Int32(0)
        elif const_expr(side.used is not None):
            length = self.used(side, i, length)
        return length, last

    @cute.jit
    def used(self, side: cutlass.Constexpr, i: Int32, length: Int32) -> Int32:
        """Tokens of a sequence of this length that take part."""
        used = Int64(side.used[i])
        if used < 0:
            cute.arch.atomic_min(side.wrong.iterator + NEGATIVE, _saturated(used))
        if used > length:
            beyond = i if const_expr(side.cu is not None) else -_saturated(used)
            cute.arch.atomic_min(side.wrong.iterator + BEYOND, beyond)
        taken = _clamped(used, 0, length)
        side.safe_used[i] = taken
        return taken

    @cute.jit
    def look(self, side: cutlass.Constexpr, i: Int32, count: Int32, here: Int64, following: Int64) -> None:
        """Look for faults of entry i of cumulative lengths."""
        if i == 0 and here != 0:
            cute.arch.atomic_min(side.wrong.iterator + STARTS, _saturated(here))
        if following < here:
            cute.arch.atomic_min(side.wrong.iterator + DECREASES, i)
        if i == count and here != side.tokens:
            cute.arch.atomic_min(side.wrong.iterator + ENDS, _saturated(here))

    @cute.jit
    def tell(self, name: cutlass.Constexpr[str], side: cutlass.Constexpr, faults: Int64) -> None:
        """One thread's: report the faults of the lengths of queries, "q", or of keys, "k"."""
        cu, used = f"cu_seqlens_{name}", f"seqused_{name}"
        if const_expr(side.cu is not None):
            if side.wrong[STARTS] != NONE:
                report(faults, f"{cu} starts", (side.wrong[STARTS],))
            i = side.wrong[DECREASES]
            if i != NONE:
                report(faults, f"{cu} decreases", (i, side.cu[i], side.cu[i + 1]))
            if side.wrong[ENDS] != NONE:
                report(faults, f"{cu} ends", (side.wrong[ENDS], side.tokens))
        if const_expr(side.used is not None):
            if side.wrong[NEGATIVE] != NONE:
                report(faults, f"{used} negative", (side.wrong[NEGATIVE],))
            i = side.wrong[BEYOND]
            if i != NONE:
                if const_expr(side.cu is not None):
                    length = side.safe_cu[i + 1] - side.safe_cu[i]
                    report(faults, f"{used} beyond", (i, side.used[i], length))
                else:
                    report(faults, f"{used} beyond padded", (-i, side.tokens))
