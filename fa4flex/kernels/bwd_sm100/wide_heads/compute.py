"""Two warpgroups, as of narrower heads, but each has every other fragment of a step's queries, and says that
it has the scores in registers before it makes probabilities of them: dP lies over half of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100 import compute as base
from fa4flex.kernels.bwd_sm100.compute import WIDE, Head
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, HALF, ROWS
from fa4flex.kernels.bwd_sm100.resources import Shared, of_half
from fa4flex.kernels.bwd_sm100.roles import COMPUTE
from fa4flex.kernels.bwd_sm100.wide_heads.config import FRAGMENTS, PACKED
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once


@dataclass(frozen=True)
class Place(base.Place):
    """first: of a warpgroup's queries in a step, by fragment. ds_row is (eight, (eights, HALF))."""

    first: tuple[Int32, ...]


class Compute(base.Compute):
    def place(self, shared: Shared, base: cute.Pointer) -> Place:
        thread = cute.arch.thread_idx()[0] - 32 * COMPUTE
        half = cute.arch.make_warp_uniform(thread // ROWS)
        row = thread % ROWS
        memory = self.config.memory

        def fragments(first: Any, columns: int, apart: int) -> cute.Tensor:
            layout = cute.make_layout((ROWS, columns, FRAGMENTS), stride=(1 << 16, 1, apart))
            return cute.make_tensor(base + first, layout)

        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT))
        store = tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT // 2))
        return Place(
            row,
            half,
            Blocks.load(load, fragments(memory.scores + half * FRAGMENT, FRAGMENT, HALF), row),
            Blocks.store(store, fragments(of_half(memory.probabilities, half), PACKED, PACKED), row),
            Blocks.load(load, fragments(memory.dprob + half * FRAGMENT, FRAGMENT, HALF), row),
            Blocks.store(store, fragments(of_half(memory.ds, half), PACKED, HALF), row),
            cute.logical_divide(shared.ds_rows[None, row], cute.make_layout(WIDE)),
            tuple(half * FRAGMENT + f * HALF for f in range(FRAGMENTS)),
        )

    @cute.jit
    def step(
        self,
        given: cutlass.Constexpr[Head],
        place: cutlass.Constexpr[Place],
        handed: cutlass.Constexpr[tuple[Shared, Pipes]],
        states: tuple[pipeline.PipelineState, pipeline.PipelineState],
        which: tuple[Int32, Int32],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries: its number, and the phase of what is there once per step."""
        shared, pipes = handed
        lse2, delta = states
        tile, phase = which
        kind = shared.q.element_type
        scores = cute.make_rmem_tensor((FRAGMENT, FRAGMENTS), Float32)
        weights = []
        cute.arch.mbarrier_wait(pipes.lse2_full + lse2.index, lse2.phase)
        cute.arch.mbarrier_wait(pipes.s_full, phase)
        for f in cutlass.range_constexpr(FRAGMENTS):
            self.take(f, place, scores, pipes)
            rows = self.numbers(shared.lse2, lse2.index, place.first[f] // FRAGMENT)
            p = self.to_change(scores[None, f])
            slopes = self.probabilities(given, p, rows, tile * ROWS + place.first[f], masked)
            packed = self.narrowed(p, kind)
            place.probabilities.put(f, packed)
            weights.append(self.weights(p, packed, slopes, kind))
        cute.arch.fence_view_async_tmem_store()
        arrive_once(pipes.p_full)
        arrive_once(pipes.lse2_empty + lse2.index)
        cute.arch.mbarrier_wait(pipes.delta_full + delta.index, delta.phase)
        cute.arch.mbarrier_wait(pipes.dp_full, phase)
        for f in cutlass.range_constexpr(FRAGMENTS):
            rows = self.numbers(shared.delta, delta.index, place.first[f] // FRAGMENT)
            ds = cute.make_rmem_tensor((FRAGMENT,), Float32)
            place.dprob.take(f, ds)
            cute.arch.fence_view_async_tmem_load()
            self.gradients(ds, rows, weights[f], kind)
            self.take_captured(given, ds, scores[None, f], tile * ROWS + place.first[f], masked)
            packed = self.narrowed(ds, kind)
            place.ds.put(f, packed)
            self.share(place.ds_row[None, (None, f)], packed, kind, place.half)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_once(pipes.ds_full)
        arrive_once(pipes.delta_empty + delta.index)

    def take(self, f: int, place: Place, scores: cute.Tensor, pipes: Pipes) -> None:
        """Scores of fragment f to registers; with the first one's all others, unless slopes need the room."""
        taken = range(f, f + 1)
        if self.hooks.slope is None:
            taken = range(FRAGMENTS if f == 0 else 0)
        if not taken:
            return
        for one in taken:
            place.scores.take(one, scores[None, one])
        cute.arch.fence_view_async_tmem_load()
        if taken[-1] == FRAGMENTS - 1:
            arrive_once(pipes.s_read)
