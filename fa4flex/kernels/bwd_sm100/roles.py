"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

REDUCE, COMPUTE, MULTIPLY, LOAD = 0, 4, 12, 13
"""First warps: a warpgroup that hands on dQ, two that compute, and single warps."""

WARPS = 16

ALLOCATED, FINISHED = 1, 2
"""Named barriers: tensor memory is there, for all who touch it; all have read the last of it."""

READ_TENSOR_MEMORY = 32 * (4 + 8)
"""Threads: of the warpgroups that reduce and compute."""

TOUCH_TENSOR_MEMORY = READ_TENSOR_MEMORY + 32
"""And the warp that multiplies."""

COMPUTING = 8
"""Warps that compute."""

RINGS = ("q", "dout")
"""Tile rings: one full and one empty barrier per stage."""

BARRIERS: dict[str, int] = {
    "k_full": 1,
    "v_full": 1,
    "s_full": 1,
    "p_full": COMPUTING,
    "dp_full": 1,
    "ds_full": COMPUTING,
    "dq_full": 1,
    "dq_empty": 4,
    "dv_full": 1,
    "dk_full": 1,
}
"""Number of arrivals that complete a phase: a warp's lanes arrive as one."""

STATISTICS: dict[str, int] = {"full": 1, "empty": COMPUTING}
"""Likewise, by stage, of the rings of rows' numbers."""


def barrier_total(q_stages: int, do_stages: int) -> int:
    """Barriers of a block: of tiles of Q and dO, and of their rows' numbers, a full and an empty one per
    stage."""
    return len(BARRIERS) + 4 * (q_stages + do_stages)
