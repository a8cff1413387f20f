"""The Hopper kernel for mixed batches: the forward kernel, whose blocks take tiles of few rows too.

producer warp --[q x warpgroups]--> consumer warpgroups --> out
              --[k ring]---------->
              --[v ring]---------->
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.fwd_sm90 import kernel as forward
from fa4flex.kernels.fwd_sm90.producer import Part
from fa4flex.kernels.fwd_sm90.resources import Layouts
from fa4flex.kernels.mixed_sm90.combine import Combine
from fa4flex.kernels.mixed_sm90.config import HANDED, KEPT, NOTED, ROWS, Config
from fa4flex.kernels.mixed_sm90.consumer import Consumer
from fa4flex.kernels.mixed_sm90.producer import Follower, PartProducer, Producer
from fa4flex.kernels.mixed_sm90.resources import Shared
from fa4flex.kernels.mixed_sm90.schedule import MixedScheduler


class Forward(forward.Forward):
    """A kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        scheduler = MixedScheduler(config, hooks)
        parts: tuple[Part, Part] = ("keys", "values")
        self.producers = (Producer(config, hooks, scheduler),)
        if config.producing == "apart":
            self.producers = tuple(PartProducer(config, hooks, scheduler, part) for part in parts)
        elif config.producing == "gathering":
            self.producers += (Follower(config, hooks, scheduler),)
        self.consumer = Consumer(config, hooks, scheduler)

    def blocks(self, arguments: Arguments, grid: Grid) -> Int32:
        """Keys of a sequence may be shared by several."""
        workers = self.config.workers
        return cutlass.min(cutlass.min(grid.total, workers) * cutlass.min(arguments.splits, workers), workers)

    def merging(self, width: int, arguments: type) -> tuple[Combine, type]:
        return Combine(width, self.config), arguments

    def members(self, layouts: Layouts, arguments: Arguments) -> dict[str, Any]:
        kept = cute.struct.MemRange[Float32, KEPT * ROWS]
        found: dict[str, Any] = {}
        for name, member in super().members(layouts, arguments).items():
            found |= {name: member} | ({"kept": kept} if name == "next" else {})
        return found

    @property
    def handed(self) -> int:
        return HANDED + NOTED

    def shared(self, storage: Any, layouts: Layouts, arguments: Arguments) -> Shared:
        one = super().shared(storage, layouts, arguments)
        # 16 bytes thread by thread: lanes of a warp meet in no bank.
        sums = cute.make_layout((128, (4, self.config.head_dim_v // 8)), stride=(4, (1, 512)))
        over = cute.recast_ptr(storage.queries.data_ptr(), dtype=Float32)
        kept = storage.kept.get_tensor(cute.make_layout((ROWS, KEPT)))
        return Shared(one.q, one.k, one.v, one.out, cute.make_tensor(over, sums), kept)
