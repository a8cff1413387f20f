"""Resources of the roles of the backward kernel of wide heads: barriers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from fa4flex.kernels.bwd_sm100 import resources as base


@dataclass(frozen=True)
class Pipes(base.Pipes):
    """Pipelines and barriers of narrower heads, and:

    s_read     scores are in registers
    dq_begun   the first EARLY columns of a step's dQ are read
    """

    s_read: cute.Pointer
    dq_begun: cute.Pointer
