"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from typing import Literal

Per = Literal["tile", "warp", "stage", "one"]
"""Unit that has a barrier each: a query tile, a warp of its softmax warpgroup, a staged chunk of the output,
or the block."""

CORRECTION = 8
"""First warp of the warpgroup that corrects outputs; the two before take the softmax of a query tile each."""

MULTIPLY, STORE, LOAD, SCHEDULE = 12, 13, 14, 15
"""Warps."""

WARPS = 16

ALLOCATED, FINISHED = 1, 2
"""Named barriers: tensor memory is there, for all who touch it; the correction warpgroup has read the last of
it."""

TOUCH_TENSOR_MEMORY = 32 * (CORRECTION + 4 + 1)
"""Threads: softmax and correction warpgroups, and the warp that multiplies."""

BARRIERS: dict[str, tuple[Per, int]] = {
    "q_full": ("tile", 1),
    "q_empty": ("tile", 1),
    "s_full": ("tile", 1),
    "p_early": ("tile", 8),
    "p_late": ("tile", 4),
    "o_full": ("tile", 1),
    "scale_full": ("warp", 1),
    "final_full": ("warp", 1),
    "final_empty": ("warp", 1),
    "out_full": ("stage", 4),
    "out_empty": ("stage", 1),
    "next_full": ("one", 1),
    "next_empty": ("one", 1),
}
"""Unit that has one each, and number of arrivals that complete a phase: a warp's lanes arrive as one. At
next_empty, all `readers` arrive."""

FROM_BOTH = ("p_early", "p_late")
"""Barriers at which the warps of both CTAs of a pair arrive."""


def barrier_count(q_tiles: int, out_stages: int, per: Per) -> int:
    return {"tile": q_tiles, "warp": 4 * q_tiles, "stage": max(out_stages, 1), "one": 1}[per]


def readers(q_tiles: int, out_stages: int) -> int:
    """Warps that read the next tile's number: of softmax and correction, those that multiply and load, and
    where outputs are staged, the one that stores."""
    return 4 * (q_tiles + 1) + 2 + (out_stages > 0)


def answer_readers(q_tiles: int, out_stages: int, ctas: int = 1) -> int:
    """The same where the number is the hardware's answer: the warp that asks reads it, too. Of a pair, both
    CTAs do, but only the first multiplies."""
    return ctas * (readers(q_tiles, out_stages) + 1) - (ctas - 1)


def barrier_total(q_tiles: int, out_stages: int) -> int:
    """Barriers of a block, besides those of the K and V rings."""
    return sum(barrier_count(q_tiles, out_stages, per) for per, _ in BARRIERS.values())
