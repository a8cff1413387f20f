"""Tiles of keys that are read, by masses of all tiles: a block has a head of keys, a warp a row.

Of each row the lightest tiles are left out, as many as the tolerance has room for: those up to a threshold,
which is found bit by bit. Tiles that all rows leave out are left out; the others are listed in order, and
what rows may see becomes places among the keys of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import exp2, log2, maximum, where
from fa4flex.kernels.plan.arguments import CHOSEN
from fa4flex.kernels.planes.config import BITS, GROUP, LEFT, READ, SLACK, ChooseConfig
from fa4flex.kernels.planes.looks import INFINITY, LN2, LOG2E, looks
from fa4flex.kernels.sequences.config import THREADS, WARPS
from fa4flex.kernels.sequences.scan import scan

_Arguments: Any = named("ChosenArguments", CHOSEN.read_by("kernel"))


class ChosenArguments(_Arguments):
    """upper, lower float32 [B, Hkv, T, rows], spans int32 [B, Hkv, rows, 2]: see masses.py. used int32 [B]:
    keys of each sequence; share float32 [B, Hkv], step int64 [1], worth: see looks; tolerance. Written: pages
    int32 [B, Hkv, T], those of tiles that are read first, in order; counts int32 [B, Hkv], their keys; places
    int32 [B, Hkv, rows, 2], spans among these; classes int32 [B, Hkv, T]: 0, LEFT or READ; shares float32
    [B, Hkv]: of the visited keys, what is left out; perhaps the memory of `share`."""


class Limits(NamedTuple):
    """Numbers of rows, in shared memory: logarithm of what all keys have at least, the largest share of a
    tile that is left out, and the largest of all."""

    total: cute.Tensor
    most: cute.Tensor
    top: cute.Tensor


class Choose:
    direction = "chosen"
    """Schema of its arguments."""

    def __init__(self, config: ChooseConfig) -> None:
        self.config, self.rows = config, config.groups * GROUP

    @cute.jit
    def __call__(self, arguments: ChosenArguments, stream: cuda.CUstream) -> None:
        batch, heads, _ = arguments.pages.shape
        self.device(arguments).launch(
            grid=[heads, batch, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def device(self, arguments: ChosenArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        a, thread = arguments, cute.arch.thread_idx()[0]
        h, b, _ = cute.arch.block_idx()
        made = SmemAllocator()
        limits = Limits(*(
            made.allocate_tensor(Float32, cute.make_layout(self.rows), byte_alignment=16) for _ in range(3)
        ))  # fmt: skip
        before = made.allocate_tensor(Int32, cute.make_layout(self.config.tiles + 1), byte_alignment=16)
        totals = made.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        look = looks(a, b, h)
        row = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if row < self.rows:
            self.limit(a, (b, h, row), limits)
        cute.arch.sync_threads()
        kept = self.list_tiles(a, (b, h, look), limits, (before, totals), thread)
        cute.arch.sync_threads()
        self.places(a, (b, h), before, thread)
        if thread == 0:
            visited, keys = kept
            a.counts[b, h] = keys
            if look:
                left = Float32(visited - keys)
                a.shares[b, h] = left / Float32(cutlass.max(visited, Int32(1)))

    # --- rows -----------------------------------------------------------------------------------------------

    @cute.jit
    def limit(self, arguments: cutlass.Constexpr, at: tuple[Int32, Int32, Int32], limits: Limits) -> None:
        """A warp's: limits of its row."""
        a, (b, h, row), lane = arguments, at, cute.arch.lane_idx()
        upper, lower = a.upper[b, h, None, row], a.lower[b, h, None, row]
        tiles, most = Int32(upper.shape[0]), -Float32.inf
        for t in cutlass.range(lane, tiles, 32, unroll=1):
            most = maximum(most, Float32(lower[t]))
        most = cute.arch.warp_reduction_max(most)
        most = where(most == -INFINITY, Float32(0.0), most)
        total = Float32(0.0)
        for t in cutlass.range(lane, tiles, 32, unroll=1):
            total = total + exp2((lower[t] - most) * LOG2E)
        total = log2(cute.arch.warp_reduction_sum(total)) * LN2 + most
        top = Float32(0.0)
        for t in cutlass.range(lane, tiles, 32, unroll=1):
            top = maximum(top, share_of(upper[t], total))
        top, bits = cute.arch.warp_reduction_max(top), Int32(0)
        for bit in cutlass.range(BITS[0], BITS[1] - 1, -1, unroll=1):
            raised, found = bits | (Int32(1) << bit), Float32(0.0)
            for t in cutlass.range(lane, tiles, 32, unroll=1):
                share = share_of(upper[t], total)
                found = found + where(share <= raised.bitcast(Float32), share, Float32(0.0))
            found = cute.arch.warp_reduction_sum(found)
            bits = where(found <= a.tolerance, raised, bits)
        if lane == 0:
            limits.total[row] = total
            limits.most[row] = bits.bitcast(Float32)
            limits.top[row] = top

    # --- tiles ----------------------------------------------------------------------------------------------

    @cute.jit
    def list_tiles(
        self,
        arguments: cutlass.Constexpr,
        at: tuple[Int32, Int32, Boolean],
        limits: Limits,
        memory: tuple[cute.Tensor, cute.Tensor],
        thread: Int32,
    ) -> tuple[Int32, Int32]:
        """Write pages and classes, and how many tiles are read before each one. Returns the keys that are
        visited, and those that are read."""
        a, (b, h, look), (before, totals) = arguments, at, memory
        tiles = Int32(a.pages.shape[2])
        first_page = (b * Int32(a.pages.shape[1]) + h) * tiles
        listed, visited, keys = Int32(0), Int32(0), Int32(0)
        for start in cutlass.range(0, tiles, THREADS, unroll=1):
            t = start + thread
            seen, read, size = self.tile(a, (b, h, look), limits, t)
            upto, some = scan(Int32(read), "sum", totals, thread)
            _, new = scan(where(seen, size, Int32(0)), "sum", totals, thread)
            _, more = scan(where(read, size, Int32(0)), "sum", totals, thread)
            if t < tiles:
                before[t] = listed + upto - Int32(read)
                a.classes[b, h, t] = where(read, Int32(READ), where(seen, Int32(LEFT), Int32(0)))
                if read:
                    a.pages[b, h, listed + upto - 1] = first_page + t
            listed, visited, keys = listed + some, visited + new, keys + more
        for t in cutlass.range(listed + thread, tiles, THREADS, unroll=1):
            a.pages[b, h, t] = first_page  # never read
        if thread == 0:
            before[tiles] = listed
        return visited, keys

    @cute.jit
    def tile(
        self, arguments: cutlass.Constexpr, at: tuple[Int32, Int32, Boolean], limits: Limits, t: Int32
    ) -> tuple[Boolean, Boolean, Int32]:
        """(visited, read, number of keys) of a tile. Those past the last are neither."""
        a, (b, h, look), block = arguments, at, self.config.block
        tiles = Int32(a.pages.shape[2])
        held, seen, needed = cutlass.min(t, tiles - 1), Boolean(False), Boolean(False)
        for row in cutlass.range_constexpr(self.rows):
            first, end = a.spans[b, h, row, 0], a.spans[b, h, row, 1]
            seen = seen | ((first < (t + 1) * block) & (end > t * block) & (first < end))
            upper = Float32(a.upper[b, h, held, row])
            share = share_of(upper, limits.total[row])
            left = (upper == -INFINITY) | ((share <= limits.most[row]) & (share < limits.top[row]))
            needed = needed | ~left
        seen = seen & (t < tiles)
        size = cutlass.max(cutlass.min(a.used[b] - t * block, Int32(block)), Int32(0))
        return seen, seen & (needed | ~look), size

    @cute.jit
    def places(
        self, arguments: cutlass.Constexpr, at: tuple[Int32, Int32], before: cute.Tensor, thread: Int32
    ) -> None:
        """Ends of spans as places among the keys that are read."""
        a, (b, h), block = arguments, at, self.config.block
        if thread < 2 * self.rows:
            row, side = thread // 2, thread % 2
            x, tiles = a.spans[b, h, row, side], Int32(a.pages.shape[2])
            t = cutlass.min(x // block, tiles)
            after = before[cutlass.min(t + 1, tiles)]
            a.places[b, h, row, side] = before[t] * block + (after - before[t]) * (x % block)


def share_of(upper: Float32, total: Float32) -> Float32:
    """Largest share that a tile may have of its row: 0 where all is masked. NaN is more than any other."""
    return where(upper == -INFINITY, Float32(0.0), exp2((upper - total) * LOG2E) * SLACK)
