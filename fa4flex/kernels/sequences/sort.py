"""Tiles of queries of a ragged batch, those with most keys first: a stable counting sort by one block.

Blocks that take tiles in this order end at about the same time: the longest do not come last (Graham 1969,
list scheduling by longest processing time). Each warp counts a run of tiles by their classes of work; the
counts, added up over classes and warps, are the places of its tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, select_

from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.keys import row_spans
from fa4flex.kernels.sequences.config import BINS, THREADS, WARPS, Config
from fa4flex.kernels.sequences.scan import scan


class Counted(NamedTuple):
    """In shared memory: tiles of each class that each warp has, int32 [BINS, WARPS], and what scans take,
    int32 [WARPS]."""

    counts: cute.Tensor
    totals: cute.Tensor


class Classes(NamedTuple):
    """`bins` classes of work, each of `unit` keys."""

    unit: Int32
    bins: Int32


class TileSort:
    """`config` has the tiles, and of the hooks `spans` says which keys rows have."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(self, arguments: Any, memory: Counted, tiles: Int32, longest: Int32, thread: Int32) -> None:
        """Write the order of `tiles` tiles; no sequence has more than `longest` keys. A class has as many
        keys as a tile of keys, or more, so that there are at most BINS of them. All threads take part."""
        warp, lane = thread // 32, thread % 32
        unit = cutlass.max(cute.ceil_div(longest + 1, BINS), Int32(self.config.tile_n))
        bins = cutlass.min(longest // unit + 1, Int32(BINS))
        for bin in cutlass.range(lane, bins, 32, unroll=1):
            memory.counts[bin, warp] = Int32(0)
        cute.arch.sync_warp()
        classes = Classes(unit, bins)
        run = cute.ceil_div(cute.ceil_div(tiles, WARPS), 32) * 32
        first, last = warp * run, cutlass.min((warp + 1) * run, tiles)
        self.pass_over(arguments, memory.counts, first, last, classes, False)
        cute.arch.sync_threads()
        self.add_up(memory, bins, thread)
        cute.arch.sync_threads()
        self.pass_over(arguments, memory.counts, first, last, classes, True)
        none = Int32(arguments.starts.shape[0]) - 1
        for number in cutlass.range(tiles + thread, arguments.order.shape[0], THREADS, unroll=1):
            arguments.order[number, 0] = none
            arguments.order[number, 1] = Int32(0)

    @cute.jit
    def pass_over(
        self,
        arguments: Any,
        counts: cute.Tensor,
        first: Int32,
        last: Int32,
        classes: Classes,
        write: cutlass.Constexpr[bool],
    ) -> None:
        """A warp's: count tiles first to last by class, or `write` each at its place, of which the counts are
        the first ones."""
        warp = cute.arch.thread_idx()[0] // 32
        for base in cutlass.range(first, last, 32, unroll=1):
            number = base + cute.arch.lane_idx()
            there = number < last
            b, tile = self.place(arguments.starts, cutlass.min(number, last - 1))
            work = cutlass.max(self.keys(arguments, b, tile), Int32(0)) // classes.unit
            bin = classes.bins - 1 - cutlass.min(work, classes.bins - 1)
            alike = cute.arch.match_sync(0xFFFFFFFF, select_(there, bin, Int32(-1)))
            before = cute.arch.popc(Int32(alike & cute.arch.lanemask_lt()))
            at = counts[bin, warp]
            cute.arch.sync_warp()
            if there and before == 0:
                counts[bin, warp] = at + cute.arch.popc(Int32(alike))
            if const_expr(write):
                self.put(arguments.order, at + before, b, tile, there)
            cute.arch.sync_warp()

    @cute.jit
    def put(self, order: cute.Tensor, place: Int32, b: Int32, tile: Int32, there: Boolean) -> None:
        if there:
            order[place, 0] = b
            order[place, 1] = tile

    @cute.jit
    def add_up(self, memory: Counted, bins: Int32, thread: Int32) -> None:
        """Turn counts into places: the number of tiles of all classes in front, and of this class in all
        warps in front."""
        counts, passed = memory.counts, Int32(0)
        for base in cutlass.range(0, bins, THREADS, unroll=1):
            bin = base + thread
            mine = Int32(0)
            if bin < bins:
                for warp in cutlass.range(WARPS, unroll=1):
                    mine = mine + counts[bin, warp]
            upto, whole = scan(mine, "sum", memory.totals, thread)
            at = passed + upto - mine
            if bin < bins:
                for warp in cutlass.range(WARPS, unroll=1):
                    count = counts[bin, warp]
                    counts[bin, warp] = at
                    at = at + count
            passed = passed + whole

    @cute.jit
    def place(self, starts: cute.Tensor, number: Int32) -> tuple[Int32, Int32]:
        """(sequence, tile in it) of tile `number`: the last sequence that does not begin behind it."""
        low, high = Int32(0), Int32(starts.shape[0]) - 1
        while high - low > 1:
            middle = (low + high) // 2
            behind = starts[middle] > number
            high = select_(behind, middle, high)
            low = select_(behind, low, middle)
        return low, number - starts[low]

    @cute.jit
    def keys(self, arguments: Any, b: Int32, tile: Int32) -> Int32:
        """Keys between the ends of the spans of a tile's first and last row; without spans, of the whole
        sequence."""
        q_len, kv_len = self.lengths(arguments, b)
        total = kv_len
        if const_expr(self.hooks.spans is not None):
            at = At(
                b=b,
                h=Int32(0),
                q_len=q_len,
                kv_len=kv_len,
                num_heads=arguments.heads,
                scale=Float32(1.0),
                scalars=tuple(arguments.scalars),
            )
            if const_expr(self.hooks.uniform is not None):
                at = at.but(uniform=tuple(self.hooks.uniform(at)))  # type: ignore[misc]
            first = tile * self.config.tile_m
            last = cutlass.min(first + self.config.tile_m, q_len) - 1
            rows = [row_spans(self.hooks, at.but(q=q, q_float=q.to(Float32))) for q in (first, last)]
            total = Int32(0)
            for one, other in zip(*rows, strict=True):
                stop = cutlass.max(one[1], other[1])
                start = Int32(0) if one[0] is None else cutlass.min(one[0], other[0])
                total = total + cutlass.max(stop - start, Int32(0))
        return total

    def lengths(self, arguments: Any, b: Int32) -> tuple[Int32, Int32]:
        """Queries and keys of a sequence that take part."""
        a = arguments
        q_len, kv_len = Int32(a.q_len), Int32(a.kv_len)
        if a.cu_q is not None:
            q_len, kv_len = a.cu_q[b + 1] - a.cu_q[b], a.cu_k[b + 1] - a.cu_k[b]
        q_len = q_len if a.used_q is None else a.used_q[b]
        kv_len = kv_len if a.used_k is None else a.used_k[b]
        return q_len, kv_len
