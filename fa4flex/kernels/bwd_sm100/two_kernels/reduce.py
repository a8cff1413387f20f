"""The warpgroup that hands on each step's dQ', as of narrower heads: a warp has 32 columns of each half of the
head, and of each 32 queries a piece."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from fa4flex.kernels.bwd_sm100 import reduce as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.bwd_sm100.two_kernels.config import STEP


class Reduce(base.Reduce):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pieces = self.config.head_dim // ROWS * (STEP // FRAGMENT)


class Idle:
    """The first warpgroup of the kernel for dV has nothing to do."""

    def __init__(self, *given: Any) -> None:
        pass

    def run(self, arguments: Any, work: Any, shared: Any, pipes: Any, base: cute.Pointer) -> None:
        pass
