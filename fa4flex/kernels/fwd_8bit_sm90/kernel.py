"""The Hopper forward kernel of codes: fwd_sm90's roles and launch, with operands of 8 bits.

producer warp --[q x warpgroups]--> consumer warpgroups --(TMA store)--> out
              --[k ring]---------->
              --[v ring]---------->  v transposed by who quantised it: nobody transposes here
"""

from __future__ import annotations

from typing import Any

import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.boxes import KeyLayouts
from fa4flex.kernels.common.codes import HALVES, coded_views
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.products import ROWS, Mmas, tiled_product
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.fwd_8bit_sm90.config import Config
from fa4flex.kernels.fwd_8bit_sm90.consumer import Consumer
from fa4flex.kernels.fwd_8bit_sm90.producer import Producer
from fa4flex.kernels.fwd_sm90 import kernel as forward


class Forward(forward.Forward):
    config: Config

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        scheduler = TileScheduler(config, hooks, group=config.group, hands=config.dynamic)
        self.producers = (Producer(config, scheduler),)
        self.consumer = Consumer(config, hooks, scheduler)

    def views(self, arguments: Arguments) -> Arguments:
        return coded_views(arguments, self.config.qk, self.config.transposed)

    def products(self, kind: Any) -> Mmas:
        config, k = self.config, OperandMajorMode.K
        sums = Int32 if config.qk == "int8" else Float32
        of_values, major = self.value_kind(kind), k if config.transposed else OperandMajorMode.MN
        registers = warpgroup.OperandSource.RMEM
        scores = tiled_product(kind, (k, k), config.tile_n, sums=sums)
        values = tiled_product(of_values, (k, major), config.apart, registers)
        return Mmas(scores, values)

    def stages(self, kind: Any) -> KeyLayouts:
        config, of_values = self.config, self.value_kind(kind)
        n, d, dv, count = config.tile_n, config.head_dim, config.head_dim_v, config.kv_stages
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        # Transposed values are a K-major operand, others an MN-major one.
        return KeyLayouts(
            sm90.make_smem_layout_b(row, (ROWS, n, d), kind, count),
            sm90.make_smem_layout_b(row if config.transposed else column, (ROWS, dv, n), of_values, count),
        )

    def value_kind(self, kind: Any) -> Any:
        return Float8E4M3FN if self.config.transposed else HALVES[self.config.pv]
