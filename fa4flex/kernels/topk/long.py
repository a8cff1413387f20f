"""The k largest scores of long rows: a block has a row, which it reads once where a sample tells enough.

sample:  a key that somewhat more than k units are larger than, very likely
  |
filter:  units that are, in shared memory, and the number of those that have this key
  |
digits:  the k-th largest key, and which of the units that have it is the last one
  |
mark:    a bit of each selected unit
  |
write:   their numbers, ascending

Where fewer than k units are larger, and with those that have the sample's key there are k, it is the k-th
largest one: of scores that are mostly the same, as those behind a ReLU, the first ones are looked for in
order. Where the sample was wrong, digits are counted and units marked by reading the row again: results do
not depend on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.memory import SmemAllocator

from fa4flex.kernels.sequences.scan import scan
from fa4flex.kernels.topk.config import LongConfig
from fa4flex.kernels.topk.digits import BINS, LANES, THREADS, Counts, Equal, Held, Nth, Whole, nth_largest
from fa4flex.kernels.topk.rows import NONE, Rule, TopkArguments, key_of, rule_of

LARGEST = 0x7FFFFFFF
WORD = 32


PIECES = 8
"""Pieces of a row that a thread has asked for before it looks at the first."""


class Memory(NamedTuple):
    """In shared memory, int32: keys and numbers of units [held], bits of units [words], what digits and sums
    over threads take, and the numbers of units that are larger than a key, and that have it [2]."""

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
        rule, seen = rule_of(arguments, row, units), units
        room = Int32(arguments.ids.shape[1])
        if const_expr(rule is not None):
            room, seen = room - rule.count, rule.open
            self.force(memory, rule, thread)
        whole = Whole(arguments.scores[row, None], seen, rule)
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
        held = self.config.held
        return Memory(
            numbers(held), numbers(held), numbers(words), counts, numbers(THREADS // 32), numbers(2)
        )

    @cute.jit
    def force(self, memory: Memory, rule: Rule, thread: Int32) -> None:
        """Mark the units that are selected whatever their scores are."""
        cute.arch.sync_threads()
        runs = (Int32(0), rule.first), (rule.begin, rule.end), (rule.last, rule.units)
        for begin, end in runs:
            for unit in cutlass.range(begin + thread, end, THREADS, unroll=1):
                _mark(memory.bits, unit)

    @cute.jit
    def select(self, memory: Memory, whole: Whole, room: Int32, thread: Int32) -> None:
        """Mark the units that are selected for their scores."""
        least = Int32(NONE)
        if whole.size > self.config.held:
            least = self.sampled(memory, whole, room, thread)
        larger, equal = self.filter(memory, whole, least, thread)
        if larger + equal < room and least != NONE:
            least = Int32(NONE)
            larger, equal = self.filter(memory, whole, least, thread)
        held = Held(memory.keys, memory.units, cutlass.min(larger, Int32(self.config.held)))
        key, last = Int32(NONE), whole.size
        if larger > self.config.held:
            if larger > room:
                key, last = self.limit(whole, whole.size, room, memory, thread)
            self.mark(whole, Limit(key, last), memory, thread)
        else:
            if larger > room:
                key, last = self.limit(held, whole.size, room, memory, thread)
            self.mark(held, Limit(key, last), memory, thread)
            if larger < room and least != NONE:
                self.mark_first(whole, least, room - larger, memory, thread)

    @cute.jit
    def sampled(self, memory: Memory, whole: Whole, room: Int32, thread: Int32) -> Int32:
        """A key that `room` units or more are larger than, and not many more, in all likelihood; NONE for
        all. Of m units of a sample that are expected to be among the `room` largest, four times the root of m
        more are taken."""
        size = self.config.sample
        cute.arch.sync_threads()
        share = Float32(size) / whole.size.to(Float32)
        some = Int32(0)
        for i in cutlass.range(thread, size, THREADS, unroll=8):
            place = cutlass.Int64(i) * whole.size // size
            key = whole.key(Int32(place))
            memory.keys[i] = key
            some = some + Int32(key != NONE)
        _, count = scan(some, "sum", memory.totals, thread)
        expected = room.to(Float32) * share
        rank = (expected + 4.0 * cute.math.sqrt(expected) + 8.0).to(Int32)
        least = Int32(NONE)
        if count >= rank:
            sample = Held(memory.keys, memory.units, Int32(size))
            least = nth_largest(sample, rank, memory.counts, thread).key
        return least

    @cute.jit
    def filter(self, memory: Memory, whole: Whole, least: Int32, thread: Int32) -> tuple[Int32, Int32]:
        """Numbers of units whose keys are larger than `least`, and that have it, if it is not NONE. The
        former are put into shared memory as far as there is room."""
        cute.arch.sync_threads()
        if thread < 2:
            memory.passed[thread] = Int32(0)
        cute.arch.sync_threads()
        each = self.config.together
        pieces = cute.logical_divide(whole.scores, cute.make_layout(each))
        equal = Int32(0)
        for base in cutlass.range(0, whole.size, THREADS * each * PIECES, unroll=1):
            scores = cute.make_rmem_tensor((each, PIECES), Float32)
            scores.fill(-Float32.inf)
            for i in range_constexpr(PIECES):
                first = base + (THREADS * i + thread) * each
                if first < whole.size:
                    cute.autovec_copy(pieces[None, first // each], scores[None, i])
            for i in range_constexpr(PIECES):
                first = base + (THREADS * i + thread) * each
                keys = [key_of(scores[j, i], first + j, whole.rule) for j in range(each)]
                for key in keys:
                    equal = equal + Int32((key == least) & (key != NONE))
                self.hold(memory, keys, first, least)
        _, equals = scan(equal, "sum", memory.totals, thread)
        return memory.passed[0], equals

    @cute.jit
    def hold(self, memory: Memory, keys: cutlass.Constexpr[list[Int32]], first: Int32, least: Int32) -> None:
        """A warp's: put units from `first` on, of a thread, whose keys are larger into shared memory."""
        masks = [cute.arch.vote_ballot_sync(key > least) for key in keys]
        total = Int32(0)
        for mask in masks:
            total = total + cute.arch.popc(mask)
        if total > 0:
            at, before = Int32(0), cute.arch.lanemask_lt()
            if cute.arch.lane_idx() == 0:
                at = cute.arch.atomic_add(memory.passed.iterator, total, sem="relaxed", scope="cta")
            at = cute.arch.shuffle_sync(at, 0)
            for j in range_constexpr(len(keys)):
                place = at + cute.arch.popc(Int32(masks[j] & before))
                if keys[j] > least and place < self.config.held:
                    memory.keys[place] = keys[j]
                    memory.units[place] = first + j
                at = at + cute.arch.popc(masks[j])

    @cute.jit
    def mark_first(self, whole: Whole, key: Int32, count: Int32, memory: Memory, thread: Int32) -> None:
        """Mark the first `count` units that have a key, of which there are as many: a block's threads are
        next to each other in the row."""
        met, first = Int32(0), Int32(0)
        while met < count and first < whole.size:
            unit = first + thread
            mine = Int32(0)
            if unit < whole.size:
                mine = Int32(whole.key(unit) == key)
            upto, some = scan(mine, "sum", memory.totals, thread)
            if mine > 0 and met + upto <= count:
                _mark(memory.bits, unit)
            met = met + some
            first = first + THREADS

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
