"""The warp that takes the next tile of queries from a counter and tells the others its number."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.work import Grid, Work


class Scheduler:
    def __init__(self, scheduler: TileScheduler) -> None:
        self.scheduler = scheduler

    @cute.jit
    def run(self, arguments: Arguments, grid: Grid, pipes: cutlass.Constexpr[Pipes]) -> None:
        self.scheduler.walk(grid, arguments, pipes.next, nothing, (), takes=True)


def nothing(work: Work, phase: Int32, carry: tuple[()]) -> tuple[()]:
    return carry
