"""The warpgroup that hands on each step's dQ', as of narrower heads: a warp has 32 columns of each half of
the head, and of each 32 queries a piece."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from fa4flex.kernels.bwd_sm100 import reduce as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.bwd_sm100.two_kernels.config import STEP

FOUR, LANES = 4, 32


class Reduce(base.Reduce):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pieces = self.config.head_dim // ROWS * (STEP // FRAGMENT)

    def first_full(self, pipes: Any) -> cute.Pointer:
        return pipes.dq_half

    def await_piece(self, pipes: Any, piece: int, later: Int32) -> None:
        if piece == self.pieces // 2:
            cute.arch.mbarrier_wait(pipes.dq_full, later ^ 1)

    def tell(self, pipes: Any, piece: int) -> None:
        if piece == self.pieces // 2 - 1:
            self.cluster.arrive(pipes.dq_early)
        super().tell(pipes, piece)

    def staged(self, shared: Any) -> None:
        """Numbers go straight to global memory: shared memory is what this kernel waits for."""

    def await_added(self) -> None:
        """Reductions of a warp come before the arrival that follows them."""

    def finish(self) -> None:
        """No copy reads shared memory."""

    def hand_on(self, part: cute.Tensor, way: base.Way, piece: int, stage: Int32) -> Int32:
        target = cute.local_tile(way.sums, (base.PIECE,), (way.first + piece,))
        fours = cute.logical_divide(target, cute.make_layout(FOUR))
        for i in range(FRAGMENT // FOUR):
            add_four(fours[None, i * LANES + cute.arch.lane_idx()].iterator, part, i * FOUR)
        return stage


def add_four(target: cute.Pointer, part: cute.Tensor, first: int) -> None:
    """Add four of a thread's numbers to global memory."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target.toint(), *(part[first + i] for i in range(FOUR))],
    )


class Idle:
    """The first warpgroup of the kernel for dV has nothing to do."""

    def __init__(self, *given: Any) -> None:
        pass

    def run(self, arguments: Any, work: Any, shared: Any, pipes: Any, base: cute.Pointer) -> None:
        pass
