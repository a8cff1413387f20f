"""Online softmax over tiles of scores (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, section 3.1).

Probabilities are exp2(factor * y - shift), where shift is factor times a maximum that may lag behind the true
one by `threshold` in log2 units (FlashAttention-4): sums and outputs then grow by at most 2^threshold. Nearly
all tiles leave the maxima as they are, and need neither a reduction over lanes nor a rescaling.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, cute, select_

from fa4flex.kernels.common.fragment import numbers, quad_reduce

Reduce = Callable[[Float32, Any], Float32]
"""Combines a number over the lanes that share a row."""

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -(2.0**25)
"""Least factor * y: below, all y of a row count as -inf. Steps of float32 are 4 there, so that probabilities
and gradients that come of the log-sum-exp mean nothing, and further down exponentials overflow."""


@dataclass(frozen=True)
class Running:
    """Per row of a thread: the `largest` y in use and `shift`, factor times it (0 while there is none); the
    `ceiling` that y may reach before the maximum is raised; this thread's share of the `total`; and `scale`,
    what the last raise multiplies the past by."""

    largest: cute.Tensor
    shift: cute.Tensor
    ceiling: cute.Tensor
    total: cute.Tensor
    scale: cute.Tensor

    @property
    def rows(self) -> int:
        return cute.size(self.largest)


def running(rows: int) -> Running:
    return Running(*(cute.make_rmem_tensor((rows,), Float32) for _ in range(5)))


def _largest(row: cute.Tensor) -> Float32:
    """Four chains: a single one would wait for itself."""
    x = numbers(row)
    chains = x[:4]
    for i in range(4, len(x)):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], x[i])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def _total(row: cute.Tensor, before: Float32) -> Float32:
    x = numbers(row)
    chains = [before + x[0], x[1], x[2], x[3]]
    for i in range(4, len(x)):
        chains[i % 4] = chains[i % 4] + x[i]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


def maxima(scores: cute.Tensor, state: Running) -> list:
    """This thread's largest y per row of a tile, seen as (row, column)."""
    return [_largest(scores[r, None]) for r in range(state.rows)]


def passes(found: list, state: Running) -> Boolean:
    """True if any lane of the warp holds a y above a ceiling."""
    above = functools.reduce(operator.or_, (x > state.ceiling[r] for r, x in enumerate(found)))
    return cute.arch.vote_any_sync(above)


def start(found: list, factor: Float32, slack: Float32, state: Running) -> None:
    """Maxima of the first tile. A row without any finite score keeps -inf, and shift 0."""
    for r, x in enumerate(found):
        _use(quad_reduce(x, cute.arch.fmax), factor, slack, state, r)
        state.total[r] = Float32(0.0)


def alone(x: Float32, combine: Any) -> Float32:
    """Stand-in for `quad_reduce` for rows that lie in one lane each."""
    return x


def raise_maxima(
    found: list, factor: Float32, slack: Float32, state: Running, reduce: Reduce = quad_reduce
) -> None:
    """Take a tile's maxima into the running ones, and rescale the totals."""
    for r, x in enumerate(found):
        before = state.largest[r]
        _use(cute.arch.fmax(reduce(x, cute.arch.fmax), before), factor, slack, state, r)
        scale = cute.math.exp2(before * factor - state.shift[r], fastmath=True)
        state.scale[r] = scale
        state.total[r] = state.total[r] * scale


def _use(largest: Float32, factor: Float32, slack: Float32, state: Running, r: int) -> None:
    largest = select_(largest * factor < LOWEST, -Float32.inf, largest)
    state.largest[r] = largest
    state.ceiling[r] = largest + slack
    state.shift[r] = select_(largest == -Float32.inf, Float32(0.0), largest) * factor


def exponentiate(row: cute.Tensor, factor: Float32, state: Running, r: int) -> None:
    """y becomes its probability, up to the denominator."""
    row.store(cute.math.exp2(row.load() * factor - state.shift[r], fastmath=True))


def accumulate(row: cute.Tensor, state: Running, r: int) -> None:
    """Take the probabilities of row r into its total."""
    state.total[r] = _total(row, state.total[r])


def finish(state: Running, sink: Float32 | None, reduce: Reduce = quad_reduce) -> tuple[list, list]:
    """Per row: what to multiply the output by, and the natural logarithm of the denominator.

    `sink` is a logit that joins the denominator and has no value. A row without keys gives 0 and -inf.
    """
    scales, lse = [], []
    for r in range(state.rows):
        total = reduce(state.total[r], operator.add)
        empty: Boolean = state.largest[r] == -Float32.inf
        shift = state.shift[r]
        if sink is None:
            scale = select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            log2 = shift + cute.math.log2(total, fastmath=True)
            lse.append(select_(empty, -Float32.inf, log2 * LN_2))
        else:
            # Relative to the larger of both, so that neither exponential overflows.
            logit = sink * LOG2_E
            common = select_(empty, logit, cute.arch.fmax(shift, logit))
            finite = select_(common == -Float32.inf, Float32(0.0), common)
            grown = select_(empty, Float32(0.0), total * cute.math.exp2(shift - finite, fastmath=True))
            everything = grown + cute.math.exp2(logit - finite, fastmath=True)
            scale = cute.math.exp2(shift - finite, fastmath=True) * cute.arch.rcp_approx(everything)
            scale = select_(empty, Float32(0.0), scale)
            lse.append((finite + cute.math.log2(everything, fastmath=True)) * LN_2)
        scales.append(scale)
    return scales, lse


def multiply_rows(acc: cute.Tensor, scales: list) -> None:
    """Multiply each row of an accumulator, seen as (row, column)."""
    for r, scale in enumerate(scales):
        row = acc[r, None]
        row.store(row.load() * scale)
