"""Zeros for sums of dQ that are added to later: a warp of the blocks that have tiles of keys of a section of
heads clears the sums of the next section.

Zeros of a kernel before this one would go to memory, and come from there again with the first addition. Those
of the next section are in the L2 cache when they are added to: a section is as many heads as it holds.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fa4flex.kernels.common.backward import BackwardArguments, BackwardTileScheduler, KeyGrid, KeyWork
from fa4flex.kernels.common.barriers import Pipes

LANES = 32
FOUR = 4
"""float32 that a lane clears at once."""

UNIT = LANES * FOUR
"""float32 that a warp clears at once: sums of a head are a whole number of these."""

TOGETHER, PAUSE = 4, 100
"""Stores after each other, and the nanoseconds until the next ones: reads and writes of shared memory wait
behind stores, and stores for the way to the L2 cache, on which additions are."""


class Clearing(NamedTuple):
    """Work of clearing: `tiles` of keys of each head, from `begin` on, clear a share of the next section,
    `share` units each, of `units` per head of dK. The ones before do not, as what they cleared might have
    left the L2 cache when that section begins, nor do the last ones: all is to be cleared then. heads: of dK,
    in all sections."""

    begin: Int32
    tiles: Int32
    share: Int32
    units: Int32
    heads: Int32


class Clearer:
    """The warp that clears, and what another one waits for."""

    def __init__(self, scheduler: BackwardTileScheduler) -> None:
        self.scheduler = scheduler

    def of(self, grid: KeyGrid, arguments: BackwardArguments) -> Clearing:
        """Work of the blocks, found on the host, which divides."""
        assert grid.sections is not None
        most = grid.tiles.divisor
        begin, tiles = most * 3 // 8, cutlass.max(most // 2, Int32(1))
        units = grid.group * (Int32(arguments.dq_sum.shape[-1]) // UNIT)
        return Clearing(begin, tiles, (units + tiles - 1) // tiles, units, grid.total // grid.tiles.divisor)

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        clearing: Clearing,
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        @cute.jit
        def clear(work: KeyWork, phase: Int32, carry: Int32) -> Int32:
            self.clear(arguments, grid, clearing, work)
            return carry

        self.scheduler.walk(grid, arguments, pipes.next, clear, Int32(0))

    @cute.jit
    def clear(self, arguments: BackwardArguments, grid: KeyGrid, clearing: Clearing, work: KeyWork) -> None:
        """Clears a tile's share, and counts it."""
        width = grid.sections.width.divisor
        section, within = section_of(grid, work)
        following = (section + 1) * width
        turn = work.tile - clearing.begin
        if turn >= 0 and turn < clearing.tiles and following < clearing.heads:
            whole = cutlass.min(clearing.heads - following, width) * clearing.units
            first = cutlass.min((turn * width + within) * clearing.share, whole)
            count = cutlass.min(clearing.share, whole - first)
            start = (Int64(following) * clearing.units + first) * UNIT + cute.arch.lane_idx() * FOUR
            here = arguments.dq_sum.iterator + start
            for i in cutlass.range(0, count, TOGETHER, unroll=1):
                for j in cutlass.range_constexpr(TOGETHER):
                    if i + j < count:
                        cute.arch.inline_ptx(
                            "st.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                            read_only_args=[(here + (i + j) * UNIT).toint(), Int32(0)],
                        )
                cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(PAUSE)])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                there = arguments.cleared.iterator + (section + 1)
                cute.arch.atomic_add(there, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def wait(self, arguments: BackwardArguments, grid: KeyGrid, clearing: Clearing, work: KeyWork) -> None:
        """A warp's: waits until the sums of a tile's section are cleared. Nobody waits for ever: tiles that
        clear them were taken earlier, by blocks of which a warp waits for nobody."""
        section, _ = section_of(grid, work)
        if section > 0:
            if cute.arch.lane_idx() == 0:
                counter = arguments.cleared.iterator + section
                expected = clearing.tiles * grid.sections.width.divisor
                done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                while done != expected:
                    done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            cute.arch.sync_warp()
            # Stores cleared them, and the copy engine adds.
            cute.arch.fence_proxy("async.global")


def section_of(grid: KeyGrid, work: KeyWork) -> tuple[Int32, Int32]:
    """(section, place in it) of a tile's head of dK."""
    section, within = divmod(work.b * grid.heads.divisor + work.part, grid.sections.width)
    return section, within
