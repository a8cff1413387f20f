"""The correction warpgroup of codes: values have a scale, and perhaps an offset, for each channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.fragment import numbers
from fa4flex.kernels.common.hooks import At
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_8bit_sm100.config import Config
from fa4flex.kernels.fwd_sm100 import correction as forward
from fa4flex.kernels.fwd_sm100.config import ROWS
from fa4flex.kernels.fwd_sm100.correction import Finished
from fa4flex.kernels.fwd_sm100.resources import Shared
from fa4flex.kernels.fwd_sm100.rows import put

LANES = 32

TOGETHER = 4
"""Channels that one load from shared memory brings."""


@dataclass(frozen=True)
class CodesShared(Shared):
    """channels: float32 (channel, scale or offset, correction warp), where values are transposed."""

    channels: cute.Tensor | None = None


class Correction(forward.Correction):
    config: Config

    def last_number(self, shared: Shared, row: Int32, tile: int) -> Any:
        """With the sum of the row's probabilities, where that is handed over."""
        scale = super().last_number(shared, row, tile)
        return (scale, shared.finals[row, self.config.q_tiles + tile]) if self.config.transposed else scale

    def bring(self, arguments: Arguments, work: Work, at: At, shared: Any) -> None:
        """Numbers of all channels to shared memory, by each warp for itself, while outputs are far from
        finished. Those of padding are the last channel's."""
        if not self.config.transposed:
            return
        kv_head, lane = at.h // (at.num_heads // kv_heads(arguments)), cute.arch.lane_idx()
        mine = shared.channels[None, None, _warp()]
        cute.arch.sync_warp()
        for i, given in enumerate((arguments.v_scale, arguments.v_offset)):
            for first in range(0, 0 if given is None else self.config.head_dim_v, LANES):
                last = Int32(given.shape[2]) - 1
                mine[first + lane, i] = given[work.b, kv_head, cutlass.min(first + lane, last)]
        cute.arch.sync_warp()

    def scaled(self, shared: Any, finished: Finished, part: cute.Tensor, first: int) -> None:
        """An offset counts as far as probabilities add up to 1: less beside sinks, and not without keys. Rows
        without keys are 0 where a channel's scale is NaN, too."""
        if not self.config.transposed:
            super().scaled(shared, finished, part, first)
            return
        scale, share = finished.scale
        empty, found = share == 0.0, []
        of_warp = shared.channels[None, None, _warp()]
        row = numbers(part)
        for c in range(0, len(row), TOGETHER):
            scales, offsets = (_numbers(of_warp[None, i], first + c) for i in range(2))
            for x, of_channel, offset in zip(row[c : c + TOGETHER], scales, offsets, strict=True):
                value = x * scale * of_channel
                value = value + offset * share if self.config.offset else value
                found.append(select_(empty, Float32(0.0), value))
        put(part, found)


def _warp() -> Int32:
    """Number of a correction warp."""
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % ROWS // LANES)


def _numbers(given: cute.Tensor, first: int) -> list[Float32]:
    """Some channels' numbers."""
    found = cute.make_rmem_tensor((TOGETHER,), Float32)
    pieces = cute.logical_divide(given, cute.make_layout(TOGETHER))
    cute.autovec_copy(pieces[None, first // TOGETHER], found)
    return numbers(found)
