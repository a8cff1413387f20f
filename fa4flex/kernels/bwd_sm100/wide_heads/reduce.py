"""The warpgroup that hands on each step's dQ, as of narrower heads. The next scores wait for the columns that
its first pieces are read from."""

from __future__ import annotations

from typing import Any

from fa4flex.kernels.bwd_sm100 import reduce as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT
from fa4flex.kernels.bwd_sm100.wide_heads.config import EARLY


class Reduce(base.Reduce):
    def tell(self, pipes: Any, piece: int) -> None:
        if piece == EARLY // FRAGMENT - 1:
            self.cluster.arrive(pipes.dq_begun)
        super().tell(pipes, piece)
