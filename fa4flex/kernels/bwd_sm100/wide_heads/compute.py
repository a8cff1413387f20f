"""Two warpgroups, as of narrower heads, but each has every other fragment of a step's queries, and says that
it has the scores in registers before it makes probabilities of them: dP lies over half of them."""

from __future__ import annotations

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100 import compute as base
from fa4flex.kernels.bwd_sm100.compute import WIDE, ApartPlace
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, HALF, ROWS
from fa4flex.kernels.bwd_sm100.resources import Shared, of_half
from fa4flex.kernels.bwd_sm100.roles import COMPUTE
from fa4flex.kernels.bwd_sm100.wide_heads.config import FRAGMENTS, PACKED
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once


class Compute(base.Compute):
    def place(self, shared: Shared, base: cute.Pointer) -> ApartPlace:
        thread = cute.arch.thread_idx()[0] - 32 * COMPUTE
        half = cute.arch.make_warp_uniform(thread // ROWS)
        row = thread % ROWS
        memory = self.config.memory

        def fragments(first: Any, columns: int, apart: int) -> cute.Tensor:
            layout = cute.make_layout((ROWS, columns, FRAGMENTS), stride=(1 << 16, 1, apart))
            return cute.make_tensor(base + first, layout)

        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT))
        store = tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT // 2))
        return ApartPlace(
            row,
            half,
            Blocks.load(load, fragments(memory.scores + half * FRAGMENT, FRAGMENT, HALF), row),
            Blocks.store(store, fragments(of_half(memory.probabilities, half), PACKED, PACKED), row),
            Blocks.load(load, fragments(memory.dprob + half * FRAGMENT, FRAGMENT, HALF), row),
            Blocks.store(store, fragments(of_half(memory.ds, half), PACKED, HALF), row),
            # (eight, (eights, HALF))
            cute.logical_divide(shared.ds_rows[None, row], cute.make_layout(WIDE)),
            tuple(half * FRAGMENT + f * HALF for f in range(FRAGMENTS)),
        )

    def share_fragment(self, place: base.Place, packed: cute.Tensor, kind: Any, f: int) -> None:
        self.share(place.ds_row[None, (None, f)], packed, kind, place.half)

    def take(
        self, f: int, head: base.Head, place: base.Place, step: base.Step, scores: cute.Tensor
    ) -> cute.Tensor:
        """With the first fragment's scores come all others, unless slopes need the room."""
        taken = range(f, f + 1)
        if self.hooks.slope is None:
            taken = range(FRAGMENTS if f == 0 else 0)
        for one in taken:
            place.scores.take(one, scores[None, one])
        if taken:
            cute.arch.fence_view_async_tmem_load()
        if taken and taken[-1] == FRAGMENTS - 1:
            arrive_once(head.pipes.s_read)
        return self.numbers(head.shared.lse2, step.lse2.index, place.number(f))
