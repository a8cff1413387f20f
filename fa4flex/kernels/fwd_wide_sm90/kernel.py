"""The Hopper forward kernel for wide heads: descriptors and launch on the host, and on the device the split
into roles.

                            ,--> consumer 0: S of the first keys,  O of the first columns --> out, or a part
producer warp --[q]--------->       | maxima, P   ^ maxima, P
              --[k, v rings]->      v             |
                            '--> consumer 1: S of the other keys, O of the other columns --> out, or a part
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from fa4flex.kernels.combine.split_forward import SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import room
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.products import Mmas, tiled_product
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.fwd_sm90 import kernel as forward
from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.producer import Producer
from fa4flex.kernels.fwd_sm90.rows import rows_of
from fa4flex.kernels.fwd_wide_sm90.config import Config, instruction_columns
from fa4flex.kernels.fwd_wide_sm90.consumer import Consumer
from fa4flex.kernels.fwd_wide_sm90.resources import Layouts, Shared, layouts_of, members_of, shared_of
from fa4flex.kernels.fwd_wide_sm90.roles import barrier_table
from fa4flex.kernels.fwd_wide_sm90.schedule import Scheduler


class Forward(SplitForward, forward.Forward):
    """A kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    config: Config

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.rows = rows_of(config)
        self.barriers = barrier_table(config, config.kv_stages, config.dynamic)
        scheduler = Scheduler(config, hooks, group=config.group, hands=config.dynamic)
        self.producers = (Producer(config, scheduler),)
        self.consumer = Consumer(config, hooks, scheduler)

    def blocks(self, arguments: Arguments, grid: Grid) -> Int32:
        """A block for each split of each tile; without splits, those of the forward kernel."""
        if self.config.splits:
            return grid.total * Int32(arguments.splits)
        return forward.Forward.blocks(self, arguments, grid)

    def products(self, kind: Any) -> Mmas:
        """Products of a warpgroup: S = q k' of its keys, O += P v of its columns, both from shared memory."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        keys, columns = self.config.keys, instruction_columns(self.config.columns)
        scores = tiled_product(kind, (k_major, k_major), keys)
        return Mmas(scores, tiled_product(kind, (k_major, mn_major), columns))

    def layouts(self, arguments: Arguments) -> Layouts:  # type: ignore[override]
        return layouts_of(self.config, arguments.q.element_type)

    def stores(self, arguments: Arguments) -> bool:
        return False

    def members(self, layouts: Layouts, arguments: Arguments) -> dict[str, Any]:
        number = cute.struct.Align[cute.struct.MemRange[Int32, HANDED], 16]
        return {
            "barriers": room(self.barriers),
            "next": number,
            **members_of(layouts, arguments.q.element_type),
        }

    def shared(self, storage: Any, layouts: Layouts, arguments: Arguments) -> Shared:  # type: ignore[override]
        return shared_of(storage, layouts)
