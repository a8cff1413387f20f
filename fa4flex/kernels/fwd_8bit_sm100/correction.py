"""The correction warpgroup of codes: values have a scale, and perhaps an offset, for each channel."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.codes import channel_pair
from fa4flex.kernels.common.fragment import numbers
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_8bit_sm100.config import Config
from fa4flex.kernels.fwd_sm100 import correction as forward
from fa4flex.kernels.fwd_sm100.correction import Finished
from fa4flex.kernels.fwd_sm100.resources import Shared
from fa4flex.kernels.fwd_sm100.rows import put


class Correction(forward.Correction):
    config: Config

    def last_number(self, shared: Shared, row: Int32, tile: int) -> Any:
        """With the sum of the row's probabilities, where that is handed over."""
        scale = super().last_number(shared, row, tile)
        return (scale, shared.finals[row, self.config.q_tiles + tile]) if self.config.transposed else scale

    def scaled(
        self, arguments: Arguments, work: Work, finished: Finished, part: cute.Tensor, first: int
    ) -> None:
        """An offset counts as far as probabilities add up to 1: less beside sinks, and not without keys. Rows
        without keys are 0 where a channel's scale is NaN, too."""
        if not self.config.transposed:
            super().scaled(arguments, work, finished, part, first)
            return
        at, (scale, share) = finished.at, finished.scale
        kv_head, empty = at.h // (at.num_heads // kv_heads(arguments)), share == 0.0
        of_head = [
            None if given is None else given[work.b, kv_head, None]
            for given in (arguments.v_scale, arguments.v_offset)
        ]
        found = []
        row = numbers(part)
        for c in range(0, len(row), 2):
            scales, offsets = (channel_pair(given, Int32(first + c)) for given in of_head)
            assert scales is not None
            for i in range(2):
                value = row[c + i] * scale * scales[i]
                value = value if offsets is None else value + offsets[i] * share
                found.append(select_(empty, Float32(0.0), value))
        put(part, found)
