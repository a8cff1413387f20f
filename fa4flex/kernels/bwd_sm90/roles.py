"""Warps of a block, and the named barriers between them, as data."""

from __future__ import annotations

from typing import Any

PRODUCER, WRITER, EXCHANGE, CONSUMER = 0, 1, 2, 4
"""First warps: one that brings tiles, one that adds up dQ, one that exchanges with the other CTA of a pair,
and consumer warpgroups."""

CLEARER = EXCHANGE
"""Warp that clears sums of dQ, where blocks are persistent: those of pairs are not."""

SCORES = 1
"""Named barrier: dS of all warpgroups is in shared memory."""

WEIGHED = 13
"""Named barrier: P' of all queries is in shared memory, for the warpgroup that has dS'."""

DS_FREE, WEIGHTS_READ, DS_SHARED = 3, 14, 15
"""Named barriers of a pair of CTAs, in which one warpgroup alone has dQ: dS' may be overwritten; so may P';
all of this CTA's dS' is in shared memory."""

SHARES = 2
"""Stages of dS, of each CTA of a pair, and of P where it is in shared memory in 16 bits."""

APART = 2
"""Numbers from a stage's named barriers to those of the next: each warpgroup has its own."""


def dq_full(w: Any, stage: Any) -> Any:
    """Named barrier: warpgroup w's part of dQ is in stage `stage` of shared memory."""
    return 2 + APART * stage + w


def dq_empty(w: Any, stage: Any) -> Any:
    """Named barrier: that stage has been read. Of a stage that there is not: all of dQ has been read."""
    return 6 + APART * stage + w


def stored(w: Any) -> Any:
    """Named barrier: what warpgroup w stages for global memory is there."""
    return 11 + w


PAIR_BARRIERS = 6
"""Barriers of a pair of CTAs: dS' of the other one has come, and may be overwritten there, by stage; V is in
registers, and columns of the other's keys have come where it was."""

UNUSED = 3
"""Barriers that only persistent blocks use: of K and V, and of the next tile's number."""


def barrier_total(q_stages: int, do_stages: int, ctas: int = 1) -> int:
    """Barriers of a block: of each stage of Q and dO, full and empty; of K and V, full and both empty; of the
    next tile's number, full and empty."""
    return 2 * (q_stages + do_stages) + 5 + PAIR_BARRIERS * (ctas - 1)
