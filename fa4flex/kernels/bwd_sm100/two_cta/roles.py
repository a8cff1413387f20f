"""Barriers of a pair's CTA, as data. Warps are those of one CTA base."""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100.roles import COMPUTING, STATISTICS
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS

RINGS = ("q", "q_t", "dout", "dout_t")
"""Tile rings: one full and one empty barrier per stage."""

BARRIERS: dict[str, int] = {
    "k_full": 1,
    "v_full": 1,
    "k_t_full": 1,
    "s_full": 1,
    "p_full": COMPUTING * CTAS,
    "dp_full": 1,
    "ds_full": COMPUTING * CTAS,
    "ds_come": COMPUTING + 1,
    "ds_there": 1,
    "dq_full": 1,
    "dq_empty": 4 * CTAS,
    "dv_full": 1,
    "dk_full": 1,
}
"""Number of arrivals that complete a phase: a warp's lanes arrive as one."""


def barrier_total(q_stages: int, do_stages: int) -> int:
    """Barriers of a CTA: of each ring of tiles, and of rows' numbers, a full and an empty one per stage."""
    return len(BARRIERS) + (2 * 2 + len(STATISTICS)) * (q_stages + do_stages)
