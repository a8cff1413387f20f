"""Two warpgroups per CTA: as in one CTA alone, but each makes half of dS for the other CTA.

A warpgroup has two fragments of a step's queries: one of those that its CTA multiplies dQ of, and one of the
other CTA's. dS of the first go to shared memory here; those of the second go there, where their arrival is
signalled (PTX ISA, "st.async"). No buffer holds them on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100 import compute as base
from fa4flex.kernels.bwd_sm100.compute import WIDE
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.bwd_sm100.resources import of_half
from fa4flex.kernels.bwd_sm100.roles import COMPUTE
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS, KEPT, PACKED
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once

SENT, HELD = 0, 1
"""A warpgroup's fragments of queries: the other CTA's, and its own."""

EIGHTS = FRAGMENT // WIDE
"""Number of pieces of a fragment, each of which a thread stores at once."""


@dataclass(frozen=True)
class Place(base.ApartPlace):
    """target: where in the `other` CTA's shared memory a thread's key has its row of dS, and `turn`, by what
    eights of that row are exchanged: the swizzle of 128 bytes."""

    other: Int32
    target: Any
    turn: Int32


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
            other=other,
            target=shared.sent + cute.assume(key * KEPT, divby=KEPT),
            turn=row % 8,
            first=tuple(at * KEPT + half * FRAGMENT for at in (other, rank)),
        )

    def take(
        self, f: int, head: base.Head, place: base.Place, step: base.Step, scores: cute.Tensor
    ) -> cute.Tensor:
        # Both, before the first probabilities are written over one of them.
        if f == 0:
            for one in range(CTAS):
                place.scores.take(one, scores[None, one])
            cute.arch.fence_view_async_tmem_load()
        return self.numbers(head.shared.lse2, step.lse2.index, place.number(f))

    def share_fragment(self, place: base.Place, packed: cute.Tensor, kind: Any, f: int) -> None:
        """Nothing yet: products still read the last step's."""

    def hand_on(self, place: Any, fragments: list[cute.Tensor], kind: Any, pipes: Any, phase: Int32) -> None:
        # The dQ before has read what lies in shared memory, in both CTAs.
        cute.arch.mbarrier_wait(pipes.dq_full, phase ^ 1)
        self.send(place, fragments[SENT], pipes.ds_come)
        self.share(place.ds_row, fragments[HELD], kind, 0)
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
