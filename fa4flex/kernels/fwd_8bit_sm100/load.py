"""The warp that brings codes: as fwd_sm100's brings numbers. Transposed values of packed sequences begin at
whole tiles of scales."""

from __future__ import annotations

from cutlass import Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.codes import at_tiles
from fa4flex.kernels.common.key_values import tokens_of
from fa4flex.kernels.common.transfer import Transfers
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_8bit_sm100.config import Config
from fa4flex.kernels.fwd_sm100 import load as forward


class Load(forward.Load):
    config: Config

    def tokens(
        self, work: Work, kv_head: Int32, transfers: Transfers, arguments: Arguments
    ) -> tuple[cute.Tensor, cute.Tensor]:
        k, v = tokens_of(work, kv_head, transfers)
        if arguments.first_tiles is not None and self.config.transposed:
            _, v = tokens_of(at_tiles(work, arguments), kv_head, transfers)
        return k, v
