"""The warpgroup that hands on each step's dQ, as of narrower heads, but the next products wait for the
columns that it is read from: pieces that shared memory has no room for yet wait in registers."""

from __future__ import annotations

from cutlass import Float32, Int32, cute

from fa4flex.codegen.kernels.bwd_sm100 import reduce as alone
from fa4flex.codegen.kernels.bwd_sm100.config import FRAGMENT
from fa4flex.codegen.kernels.bwd_sm100_wide.config import EARLY
from fa4flex.codegen.kernels.bwd_sm100_wide.parts import Pipes
from fa4flex.codegen.kernels.common.tensor_core import Blocks

TOGETHER = 2
"""Pieces that a thread takes before it hands them on."""


class Reduce(alone.Reduce):
    def hand_over(self, dq: Blocks, pipes: Pipes, way: alone.Way, stage: Int32) -> Int32:
        for start in range(0, self.pieces, TOGETHER):
            parts = {}
            for piece in range(start, min(start + TOGETHER, self.pieces)):
                parts[piece] = cute.make_rmem_tensor((FRAGMENT,), Float32)
                dq.take(piece, parts[piece])
            cute.arch.fence_view_async_tmem_load()
            if EARLY // FRAGMENT - 1 in parts:
                self.cluster.arrive(pipes.dq_begun)
            if self.pieces - 1 in parts:
                self.cluster.arrive(pipes.dq_empty)
            for piece, part in parts.items():
                stage = self.hand_on(part, way, piece, stage)
        return stage
