"""From a warpgroup's accumulators of codes to the output: values have a scale, and perhaps an offset, for
each channel."""

from __future__ import annotations

import operator
from typing import Any

from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.codes import channel_pair
from fa4flex.kernels.common.fragment import compute_before, quad_reduce
from fa4flex.kernels.common.softmax import Finished, Running
from fa4flex.kernels.fwd_8bit_sm90.config import Config
from fa4flex.kernels.fwd_sm90 import epilogue as forward

GROUP = 16
"""Columns of a thread whose scales are loaded at a time where values are wide: each takes two registers."""


class Epilogue(forward.Epilogue):
    config: Config

    def of_codes(
        self,
        arguments: Arguments,
        mine: Any,
        out: cute.Tensor,
        finished: list[Finished],
        lane: Int32,
    ) -> None:
        """An offset counts as far as probabilities add up to 1: less beside sinks, and not without keys. Rows
        without keys are 0 where a channel's scale is NaN, too."""
        if not self.config.transposed:
            return
        kv_head = mine.at.h // (mine.at.num_heads // kv_heads(arguments))
        # Maxima do not tell: a row of NaN has none either.
        empty = [quad_reduce(mine.state.total[r], operator.add) == 0.0 for r in range(2)]
        shares = [_share(mine.state, finished, r, arguments.sinks is not None) for r in range(2)]
        of_head = [
            None if given is None else given[mine.work.b, kv_head, None]
            for given in (arguments.v_scale, arguments.v_offset)
        ]
        for c in range(0, cute.size(out, mode=[1]), 2):
            channel = 4 * c + lane % 4 * 2
            scale, offset = (channel_pair(given, channel) for given in of_head)
            assert scale is not None
            for r in range(2):
                for i in range(2):
                    value = out[r, c + i] * scale[i]
                    value = value if offset is None else value + offset[i] * shares[r]
                    out[r, c + i] = select_(empty[r], Float32(0.0), value)
            if self.config.parts > 1 and c % GROUP == GROUP - 2:
                compute_before(out[1, c + 1])


def _share(state: Running, finished: list[Finished], r: int, sinks: bool) -> Float32:
    """Sum of the probabilities of a row."""
    if not sinks:
        return select_(state.largest[r] == -Float32.inf, Float32(0.0), Float32(1.0))
    scale = finished[r].scale
    assert scale is not None
    return quad_reduce(state.total[r], operator.add) * scale
