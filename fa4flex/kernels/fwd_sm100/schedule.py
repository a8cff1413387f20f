"""The warp that takes the next tile of queries from a counter and tells the others its number."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.course import Course
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.fwd_sm100.parts import Pipes


class Scheduler:
    def __init__(self, course: Course) -> None:
        self.course = course

    @cute.jit
    def run(self, arguments: Arguments, grid: Grid, pipes: cutlass.Constexpr[Pipes]) -> None:
        phase = Int32(1)
        number = self.course.first()
        work = self.course.work(number, grid, arguments)
        while work.valid:
            number = self.course.take(number, arguments)
            self.course.publish(number, pipes.next, phase)
            work = self.course.work(number, grid, arguments)
            phase ^= 1
        self.course.finish(arguments)
