"""Largest scores of heads of queries, over all tiles and parts of keys: maxima are the same in any order."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute, select_

from fa4flex.kernels.common.softmax import LN_2, OnlineSoftmax


def largest_seen(softmax: OnlineSoftmax, r: int, counts: Boolean) -> Float32:
    """The largest score that this thread has seen of its row r, in natural units; -inf where a row does not
    count, as it is past the last."""
    state = softmax.state
    assert state.seen is not None
    return select_(counts, state.seen[r] * (softmax.factor * LN_2), -Float32.inf)


@cute.jit
def largest_of_warp(x: Float32) -> Float32:
    """The largest of all lanes."""
    for distance in cutlass.range_constexpr(5):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1 << distance))
    return x


@cute.jit
def put_largest(arguments: Any, h: Int32, largest: Float32, mine: Boolean) -> None:
    """Raise a head's largest score, [H], which is -inf at first. mine: whether this lane is to do it."""
    if mine & (largest > -Float32.inf):
        cute.arch.atomic_fmax(arguments.max_logit.iterator + h, largest, sem="relaxed", scope="gpu")
