"""The k largest scores of long rows: a block has a row, which it reads once where a sample tells enough.

sample:  a key that somewhat more than k units are at least as large as, very likely
  |
filter:  units that are, in shared memory
  |
digits:  the k-th largest key, and which of the units that have it is the last one
  |
mark:    a bit of each selected unit
  |
write:   their numbers, ascending

Where the sample was wrong, as fewer than k units pass, or more than there is room for, digits are counted and
units marked by reading the row again: results do not depend on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.memory import SmemAllocator

from fa4flex.kernels.sequences.scan import scan
from fa4flex.kernels.topk.config import HELD, SAMPLE, LongConfig
from fa4flex.kernels.topk.digits import BINS, LANES, THREADS, Counts, Equal, Held, Nth, Whole, nth_largest
from fa4flex.kernels.topk.rows import LOWEST, NONE, Forced, TopkArguments, forced_of, key_of

LARGEST = 0x7FFFFFFF
WORD = 32


class Memory(NamedTuple):
    """In shared memory, int32: keys and numbers of units [HELD], bits of units [words], what digits and sums
    over threads take, and the number of units that passed [1]."""

    keys: cute.Tensor
    units: cute.Tensor
    bits: cute.Tensor
    counts: Counts
    totals: cute.Tensor
    passed: cute.Tensor


class Limit(NamedTuple):
    """Units are selected whose key is larger; or the same, and their number at most `last`."""

    key: Int32
    last: Int32


class LongRows:
    direction = "topk"
    """Schema of its arguments."""

    def __init__(self, config: LongConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: TopkArguments, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(
            grid=[Int32(arguments.scores.shape[0]), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: TopkArguments) -> None:
        thread, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        memory = self.memory()
        for i in cutlass.range(thread, self.config.units // WORD, THREADS, unroll=1):
            memory.bits[i] = Int32(0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        units = Int32(arguments.scores.shape[1])
        whole = Whole(arguments.scores[row, None], units, forced_of(arguments, row, units))
        room = Int32(arguments.ids.shape[1])
        if const_expr(whole.forced is not None):
            room = room - whole.forced.count
            self.force(memory, whole.forced, thread)
        if room > 0:
            self.select(memory, whole, room, thread)
        cute.arch.sync_threads()
        self.write(arguments, memory, row, thread)

    def memory(self) -> Memory:
        made = SmemAllocator()

        def numbers(shape: Any) -> cute.Tensor:
            return made.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)

        lanes = made.allocate_tensor(
            Int32, cute.make_layout((BINS, LANES), stride=(LANES, 1)), byte_alignment=16
        )
        counts = Counts(lanes, numbers(BINS), numbers(4))
        words = self.config.units // WORD
        return Memory(
            numbers(HELD), numbers(HELD), numbers(words), counts, numbers(THREADS // 32), numbers(1)
        )

    @cute.jit
    def force(self, memory: Memory, forced: Forced, thread: Int32) -> None:
        """Mark the units that are selected whatever their scores are."""
        cute.arch.sync_threads()
        runs = (Int32(0), forced.first), (forced.begin, forced.end), (forced.last, forced.units)
        for begin, end in runs:
            for unit in cutlass.range(begin + thread, end, THREADS, unroll=1):
                _mark(memory.bits, unit)

    @cute.jit
    def select(self, memory: Memory, whole: Whole, room: Int32, thread: Int32) -> None:
        """Mark the units that are selected for their scores."""
        least = Int32(LOWEST)
        if whole.size > HELD:
            least = self.sampled(memory, whole, room, thread)
        passed = self.filter(memory, whole, least, thread)
        if passed < room and least != LOWEST:
            passed = self.filter(memory, whole, Int32(LOWEST), thread)
        held = Held(memory.keys, memory.units, cutlass.min(passed, Int32(HELD)))
        key, last = Int32(NONE), whole.size
        if passed > HELD:
            if passed > room:
                key, last = self.limit(whole, whole.size, room, memory, thread)
            self.mark(whole, Limit(key, last), memory, thread)
        else:
            if passed > room:
                key, last = self.limit(held, whole.size, room, memory, thread)
            self.mark(held, Limit(key, last), memory, thread)

    @cute.jit
    def sampled(self, memory: Memory, whole: Whole, room: Int32, thread: Int32) -> Int32:
        """A key that `room` units or more are at least as large as, and not many more, in all likelihood. Of
        m units of a sample that are expected to be among the `room` largest, four times the root of m more
        are taken."""
        cute.arch.sync_threads()
        if thread == 0:
            memory.passed[0] = Int32(0)
        cute.arch.sync_threads()
        share = Float32(SAMPLE) / whole.size.to(Float32)
        some = Int32(0)
        for i in cutlass.range(thread, SAMPLE, THREADS, unroll=4):
            place = cutlass.Int64(i) * whole.size // SAMPLE
            key = whole.key(Int32(place))
            memory.keys[i] = key
            some = some + Int32(key != NONE)
        _, count = scan(some, "sum", memory.totals, thread)
        expected = room.to(Float32) * share
        rank = (expected + 4.0 * cute.math.sqrt(expected) + 8.0).to(Int32)
        least = Int32(LOWEST)
        if count >= rank:
            sample = Held(memory.keys, memory.units, Int32(SAMPLE))
            least = nth_largest(sample, rank, memory.counts, thread).key
        return least

    @cute.jit
    def filter(self, memory: Memory, whole: Whole, least: Int32, thread: Int32) -> Int32:
        """Number of units whose keys are `least` or larger, which are put into shared memory as far as there
        is room."""
        cute.arch.sync_threads()
        if thread == 0:
            memory.passed[0] = Int32(0)
        cute.arch.sync_threads()
        each, lane = self.config.together, cute.arch.lane_idx()
        pieces = cute.logical_divide(whole.scores, cute.make_layout(each))
        before = cute.arch.lanemask_lt()
        for base in cutlass.range(0, whole.size, THREADS * each, unroll=2):
            first = base + thread * each
            scores = cute.make_rmem_tensor((each,), Float32)
            scores.fill(-Float32.inf)
            if first < whole.size:
                cute.autovec_copy(pieces[None, first // each], scores)
            keys = [key_of(scores[j], first + j, whole.forced) for j in range(each)]
            masks = [cute.arch.vote_ballot_sync(key >= least) for key in keys]
            total = Int32(0)
            for mask in masks:
                total = total + cute.arch.popc(mask)
            if total > 0:
                at = Int32(0)
                if lane == 0:
                    at = cute.arch.atomic_add(memory.passed.iterator, total, sem="relaxed", scope="cta")
                at = cute.arch.shuffle_sync(at, 0)
                for j in range_constexpr(each):
                    place = at + cute.arch.popc(Int32(masks[j] & before))
                    if keys[j] >= least and place < HELD:
                        memory.keys[place] = keys[j]
                        memory.units[place] = first + j
                    at = at + cute.arch.popc(masks[j])
        cute.arch.sync_threads()
        return memory.passed[0]

    @cute.jit
    def limit(self, among: Held | Whole, units: Int32, room: Int32, memory: Memory, thread: Int32) -> Limit:
        """The limit of the `room` largest of more units; of equal ones, lower ones come first."""
        nth = nth_largest(among, room, memory.counts, thread)
        last = units
        if nth.rank < nth.equal:
            last = units - self.nth_equal(among, nth, units, memory, thread)
        return Limit(nth.key, last)

    @cute.jit
    def nth_equal(self, among: Held | Whole, nth: Nth, units: Int32, memory: Memory, thread: Int32) -> Int32:
        return nth_largest(Equal(among, nth.key, units), nth.rank, memory.counts, thread).key

    @cute.jit
    def mark(self, among: Held | Whole, limit: Limit, memory: Memory, thread: Int32) -> None:
        for i in cutlass.range(thread, among.size, THREADS, unroll=1):
            key, unit = among.key(i), among.unit(i)
            if key != NONE and (key > limit.key or (key == limit.key and unit <= limit.last)):
                _mark(memory.bits, unit)

    @cute.jit
    def write(self, arguments: TopkArguments, memory: Memory, row: Int32, thread: Int32) -> None:
        """Numbers of marked units, ascending. A thread has a run of words."""
        words = cute.ceil_div(Int32(arguments.scores.shape[1]), WORD)
        each = cute.ceil_div(words, THREADS)
        begin = thread * each
        end = cutlass.min(begin + each, words)
        mine = Int32(0)
        for i in cutlass.range(begin, end, unroll=1):
            mine = mine + cute.arch.popc(memory.bits[i])
        upto, count = scan(mine, "sum", memory.totals, thread)
        ids, place = arguments.ids[row, None], upto - mine
        for i in cutlass.range(begin, end, unroll=1):
            word = memory.bits[i]
            while word != 0:
                ids[place] = i * WORD + cute.arch.popc(Int32((word & -word) - 1))
                word = word & (word - 1)
                place = place + 1
        for i in cutlass.range(count + thread, arguments.ids.shape[1], THREADS, unroll=1):
            ids[i] = Int32(-1)
        if thread == 0:
            arguments.counts[row] = count


def _mark(bits: cute.Tensor, unit: Int32) -> None:
    cute.arch.atomic_or(bits.iterator + unit // WORD, Int32(1) << (unit % WORD), sem="relaxed", scope="cta")
