"""Tiles of keys whose scores are so far below those of their rows that they are left out.

Of n keys of a row's tiles, one whose score lies log2(n / skip), in exponents of 2, below the row's maximum in
use has a probability of at most skip / n. docs/primitives.md has the proof.
"""

from __future__ import annotations

import functools
import math
import operator

from cutlass import Boolean, Float32, Int32, cute

from fa4flex.kernels.common.fragment import numbers
from fa4flex.kernels.common.softmax import OnlineSoftmax


def depth_of(softmax: OnlineSoftmax, keys: Int32, skip: float) -> Float32:
    """Distance, in units of y, of a score that is left out below the ceiling of its row; of so many keys."""
    below = cute.math.log2(keys.to(Float32), fastmath=True) + (softmax.threshold - math.log2(skip))
    return below * cute.arch.rcp_approx(softmax.factor)


def some_count(softmax: OnlineSoftmax, highest: list[Float32], depth: Float32) -> Boolean:
    """True if one of this thread's scores, of which these are the highest by row, counts: NaN does, and so
    does any number in a row without keys so far."""
    low = (x <= softmax.state.ceiling[r] - depth for r, x in enumerate(highest))
    return ~functools.reduce(operator.and_, low)


def highest_of(softmax: OnlineSoftmax, scores: cute.Tensor) -> list[Float32]:
    """This thread's largest y per row of a tile, seen as (row, column); NaN where one is."""
    return [_largest(scores[r, None]) for r in range(softmax.state.rows)]


def _largest(row: cute.Tensor) -> Float32:
    """Four chains: a single one would wait for itself."""
    x = numbers(row)
    chains = x[:4]
    for i in range(4, len(x)):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], x[i], nan=True)
    halves = (cute.arch.fmax(chains[i], chains[i + 1], nan=True) for i in (0, 2))
    return cute.arch.fmax(*halves, nan=True)
