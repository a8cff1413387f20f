"""A consumer warpgroup: 64 rows of a tile of many, or all rows of a tile of few and half of the keys."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.transfer import States, warp_uniform
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm90 import consumer as forward
from fa4flex.kernels.mixed_sm90.config import Config
from fa4flex.kernels.mixed_sm90.few_rows import FewRows
from fa4flex.kernels.mixed_sm90.schedule import MixedScheduler
from fa4flex.kernels.mixed_sm90.sequences import Cut, Piece


class Consumer(forward.Consumer):
    def __init__(self, config: Config, hooks: Hooks, scheduler: MixedScheduler) -> None:
        super().__init__(config, hooks, scheduler)
        self.few_rows = FewRows(config, hooks)

    def walk(
        self, attend: Any, arguments: Arguments, grid: Grid, shared: Any, pipes: Pipes, states: States
    ) -> None:
        @cute.jit
        def attend_few(work: Work, cut: Cut, phase: Int32, states: States) -> States:
            return self.few_rows.attend(
                Piece(work, cut), arguments, shared, pipes, phase, warp_uniform(states)
            )

        @cute.jit
        def attend_many(work: Work, phase: Int32, states: States) -> States:
            return attend(work, phase, warp_uniform(states))

        self.scheduler.walk(grid, arguments, pipes.next, (attend_few, attend_many), states)
