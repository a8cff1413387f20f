"""The Blackwell forward kernel of codes: fwd_sm100's roles and launch, with operands of 8 bits.

Values are transposed by who quantised them, 16 keys in the order of Hopper's fragments: softmax warpgroups
put probabilities in tensor memory in the same order.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.codes import HALVES, coded_views
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.fwd_8bit_sm100.config import Config
from fa4flex.kernels.fwd_8bit_sm100.correction import CodesShared, Correction
from fa4flex.kernels.fwd_8bit_sm100.load import Load
from fa4flex.kernels.fwd_8bit_sm100.softmax import Softmax
from fa4flex.kernels.fwd_sm100 import kernel as forward
from fa4flex.kernels.fwd_sm100.resources import Products, Shared
from fa4flex.kernels.fwd_sm100.tiles import CHANNELS
from fa4flex.kernels.plan.topology import WARPGROUP


class CodeProducts(Products):
    """S = q k^T of codes, and O += p v with values of 8 bits, a row of keys per channel, or of 16."""

    config: Config

    def __init__(self, config: Config, kind: Any, cluster: Cluster) -> None:
        self.sums = Int32 if config.qk == "int8" else Float32
        self.value_major = OperandMajorMode.K if config.transposed else OperandMajorMode.MN
        super().__init__(config, kind, cluster)

    def kind_of_values(self, kind: Any) -> Any:
        return Float8E4M3FN if self.config.transposed else HALVES[self.config.pv]


class Forward(forward.Forward):
    config: Config

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        self.load = Load(config, self.tiles, self.cluster)
        self.softmax = Softmax(config, hooks, self.tiles, self.cluster)
        self.correction = Correction(config, hooks, self.tiles, self.cluster)

    def views(self, arguments: Arguments) -> Arguments:
        return coded_views(arguments, self.config.qk, self.config.transposed)

    def members(self, products: Products, out_kind: Any) -> dict[str, Any]:
        members, config = super().members(products, out_kind), self.config
        if config.transposed:
            room = cute.struct.MemRange[Float32, config.head_dim_v * CHANNELS * WARPGROUP]
            tiles = {name: members.pop(name) for name in ("queries", "keys", "values", "out")}
            members |= {"channels": cute.struct.Align[room, 16], **tiles}
        return members

    def shared(self, storage: Any, products: Products, out_kind: Any) -> Shared:
        shared = super().shared(storage, products, out_kind)
        if not self.config.transposed:
            return shared
        channels = cute.make_layout((self.config.head_dim_v, CHANNELS, WARPGROUP))
        return CodesShared(**vars(shared), channels=storage.channels.get_tensor(channels))

    def products(self, arguments: Arguments) -> CodeProducts:
        return CodeProducts(self.config, arguments.q.element_type, self.cluster)
