"""Two warpgroups per CTA: as in one CTA alone, but each makes half of dS for the other CTA.

A warpgroup has two fragments of a step's queries: one of those that its CTA multiplies dQ of, and one of the
other CTA's. dS of the first go to shared memory here; those of the second go there, where their arrival is
signalled (PTX ISA, "st.async"). No buffer holds them on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100 import compute as base
from fa4flex.kernels.bwd_sm100.compute import WIDE, Head
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.bwd_sm100.resources import of_half
from fa4flex.kernels.bwd_sm100.roles import COMPUTE
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS, KEPT, PACKED
from fa4flex.kernels.bwd_sm100.two_cta.resources import Shared
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once

SENT, HELD = 0, 1
"""A warpgroup's fragments of queries: the other CTA's, and its own."""

EIGHTS = FRAGMENT // WIDE
"""Number of pieces of a fragment, each of which a thread stores at once."""


@dataclass(frozen=True)
class Place(base.Place):
    """target: where in the `other` CTA's shared memory a thread's key has its row of dS, and `turn`, by what
    eights of that row are exchanged: the swizzle of 128 bytes. first: of a warpgroup's queries in a step, by
    fragment."""

    other: Int32
    target: Any
    turn: Int32
    first: tuple[Int32, Int32]


class Compute(base.Compute):
    def place(self, shared: Any, base: cute.Pointer) -> Place:
        thread = cute.arch.thread_idx()[0] - 32 * COMPUTE
        half = cute.arch.make_warp_uniform(thread // ROWS)
        row = thread % ROWS
        rank = self.cluster.rank()
        other = 1 - rank
        memory = self.config.memory

        def fragments(first: Any, columns: int, apart: int) -> cute.Tensor:
            """SENT, then HELD: those of the first CTA lie first."""
            shape, step = (ROWS, columns, CTAS), (rank - other) * apart
            start = base + (first + other * apart)
            return cute.make_tensor(start, cute.make_layout(shape, stride=(1 << 16, 1, step)))

        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT))
        store = tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT // 2))
        key = rank * ROWS + row
        eights = cute.logical_divide(shared.ds_rows[None, key], cute.make_layout(WIDE))
        return Place(
            row,
            half,
            Blocks.load(load, fragments(memory.scores + half * FRAGMENT, FRAGMENT, KEPT), row),
            Blocks.store(store, fragments(of_half(memory.probabilities, half), PACKED, PACKED), row),
            Blocks.load(load, fragments(memory.dprob + half * FRAGMENT, FRAGMENT, KEPT), row),
            Blocks.store(store, fragments(of_half(memory.ds, half), PACKED, KEPT), row),
            cute.domain_offset((0, half * EIGHTS), eights),
            other,
            shared.sent + cute.assume(key * KEPT, divby=KEPT),
            row % 8,
            tuple(at * KEPT + half * FRAGMENT for at in (other, rank)),
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
        scores = cute.make_rmem_tensor((FRAGMENT, CTAS), Float32)
        weights, handed_on = [], []
        cute.arch.mbarrier_wait(pipes.lse2_full + lse2.index, lse2.phase)
        cute.arch.mbarrier_wait(pipes.s_full, phase)
        # Both, before the first probabilities are written over one of them.
        for f in cutlass.range_constexpr(CTAS):
            place.scores.take(f, scores[None, f])
        cute.arch.fence_view_async_tmem_load()
        for f in cutlass.range_constexpr(CTAS):
            rows = self.numbers(shared.lse2, lse2.index, place.first[f] // FRAGMENT)
            p = self.to_change(scores[None, f])
            slopes = self.probabilities(given, p, rows, tile * ROWS + place.first[f], masked)
            packed = self.narrowed(p, kind)
            place.probabilities.put(f, packed)
            weights.append(self.weights(p, packed, slopes, kind))
        cute.arch.fence_view_async_tmem_store()
        arrive_once(pipes.p_full, first=True)
        arrive_once(pipes.lse2_empty + lse2.index)
        cute.arch.mbarrier_wait(pipes.delta_full + delta.index, delta.phase)
        cute.arch.mbarrier_wait(pipes.dp_full, phase)
        for f in cutlass.range_constexpr(CTAS):
            rows = self.numbers(shared.delta, delta.index, place.first[f] // FRAGMENT)
            ds = cute.make_rmem_tensor((FRAGMENT,), Float32)
            place.dprob.take(f, ds)
            cute.arch.fence_view_async_tmem_load()
            self.gradients(ds, rows, weights[f], kind)
            self.take_captured(given, ds, scores[None, f], tile * ROWS + place.first[f], masked)
            handed_on.append(self.narrowed(ds, kind))
            place.ds.put(f, handed_on[f])
        cute.arch.fence_view_async_tmem_store()
        arrive_once(pipes.ds_full, first=True)
        arrive_once(pipes.delta_empty + delta.index)
        # The dQ before has read what lies in shared memory, in both CTAs.
        cute.arch.mbarrier_wait(pipes.dq_full, phase ^ 1)
        self.send(place, handed_on[SENT], pipes.ds_come)
        self.share(place.ds_row, handed_on[HELD], kind, 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_once(pipes.ds_come)

    def send(self, place: Place, packed: cute.Tensor, come: cute.Pointer) -> None:
        """A thread's fragment of dS' to the other CTA."""
        words = cute.recast_tensor(packed, Int32)
        for i in range(EIGHTS):
            eight = (place.half * EIGHTS + i) ^ place.turn
            four = tuple(words[4 * i + j] for j in range(4))
            target = place.target + cute.assume(eight * WIDE, divby=WIDE)
            cute.arch.store_async_dsmem(target, four, come, place.other)
