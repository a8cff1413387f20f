"""Barriers of a block with wide heads, as data. Warps are those of narrower ones."""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100 import roles as base

BARRIERS: dict[str, int] = {**base.BARRIERS, "s_read": base.COMPUTING, "dq_begun": 4}
"""Number of arrivals that complete a phase: a warp's lanes arrive as one."""


def barrier_total(q_stages: int, do_stages: int) -> int:
    """Barriers of a block."""
    more = len(BARRIERS) - len(base.BARRIERS)
    return base.barrier_total(q_stages, do_stages) + more
