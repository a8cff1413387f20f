"""The logistic function of weights: one special function a score, where a group of scores allows it.

1 / (1 + exp(-x)) is an exponential and a reciprocal, and beside the products of a tile each of these takes as
long as four instructions. So a weight in which it is met once is computed for a group of a thread's scores at
a time. All lanes of a warp ask whether their groups lie where a cheaper formula holds, which costs half an
instruction a score, as three words are compared at once, and go one way.

                argument         quick                        where                     error
    SMALL       y = x log2(e)    e - e^2, with e = 2^y        all y at most -5.5        2^-11 of the value
    EVEN        h = x / 2        (1 + tanh h) / 2             all h above -2.25         2^-12, absolute

The first is for what lies far below 0, as with a bias of -log n. The second is that of tanh.approx, which is
within 2^-11 of its value: above h = -2.25, where the function is 0.011, this and a weight rounded to bfloat16
are at most twice as far off as the weight of a score that was rounded to bfloat16, of SiLU as well.

Elsewhere, as of NaN, the value is 1 / (1 + 2^-y), to a few units in the last place. Of SMALL, two such have
one reciprocal, of a product, where all products of the group are numbers whose reciprocals are: three special
functions for two scores.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Uint32, const_expr, cute

from fa4flex.kernels.common.hooks import At, Pointwise
from fa4flex.kernels.common.math import divide, exp2, tanh
from fa4flex.kernels.common.softmax import LOG2_E

SCORES = 32
"""Scores of a group of a thread. A warp has 1,024 of them; two votes a step cost 0.1 instructions a score."""
LARGEST = 2.0**121
"""Bound of a product of divisors: its reciprocal is no subnormal number, which would be taken for 0."""

Arguments = Sequence[tuple[Float32, ...]]
"""Arguments that a hook calls at.logistic with, for each score of a group."""
Places = Sequence[tuple[int, int, At]]


@dataclass(frozen=True)
class Small:
    """1 / (1 + 2^-y)."""

    below: float = -5.5

    paired = True
    """True if two scores may share a reciprocal."""

    def divisor(self, y: Any) -> Any:
        return exp2(-y) + 1.0

    def exact(self, y: Any) -> Any:
        return divide(1.0, self.divisor(y))

    def quick(self, y: Any) -> Any:
        e = exp2(y)
        return e - e * e

    def fits(self, arguments: Arguments) -> Boolean:
        """True if y <= below for all. Words of negative numbers rise with their size, above all others."""
        return _folded([y for (y,) in arguments], cutlass.min) >= _word(self.below)


@dataclass(frozen=True)
class Even:
    """m (1 + tanh h) = 2 m / (1 + exp(-2 h)), for m = 1/2 the logistic function."""

    above: float = -2.25

    paired = False

    def exact(self, h: Any, m: Any) -> Any:
        return divide(m, exp2(h * (-2.0 * LOG2_E)) * 0.5 + 0.5)

    def quick(self, h: Any, m: Any) -> Any:
        return tanh(h) * m + m

    def fits(self, arguments: Arguments) -> Boolean:
        """True if h > above for all."""
        return _folded([h for h, _ in arguments], cutlass.max) < _word(self.above)


SMALL, EVEN = Small(), Even()


def weigh(hook: Pointwise, scores: cute.Tensor, places: Places) -> None:
    """scores (row, column): q.k becomes its weight by a hook that calls at.logistic once, at these places."""
    for first in range(0, len(places), SCORES):
        _weigh_group(hook, scores, places[first : first + SCORES])


@cute.jit
def _weigh_group(
    hook: cutlass.Constexpr[Pointwise],
    scores: cutlass.Constexpr[cute.Tensor],
    places: cutlass.Constexpr[Places],
) -> None:
    way, arguments = hook.logistic, _arguments(hook, scores, places)
    if cute.arch.vote_all_sync(way.fits(arguments)):
        _store(hook, [way.quick(*x) for x in arguments], scores, places)
    else:
        if const_expr(way.paired):
            _weigh_pairs(hook, [way.divisor(*x) for x in arguments], scores, places)
        else:
            _store(hook, [way.exact(*x) for x in arguments], scores, places)


@cute.jit
def _weigh_pairs(
    hook: cutlass.Constexpr[Pointwise],
    divisors: cutlass.Constexpr[list[Float32]],
    scores: cutlass.Constexpr[cute.Tensor],
    places: cutlass.Constexpr[Places],
) -> None:
    """Logistic functions as reciprocals of divisors, of which none is below 1. A product that is infinite or
    NaN, or whose reciprocal would be subnormal, sends the group the other way: it is of one score, and would
    be the end of two."""
    products = [math.prod(divisors[i : i + 2]) for i in range(0, len(divisors), 2)]
    if cute.arch.vote_all_sync(_folded(products, cutlass.max) < _word(LARGEST)):
        inverses = [divide(1.0, x) for x in products]
        others = [divisors[i ^ 1] if i ^ 1 < len(divisors) else 1.0 for i in range(len(divisors))]
        _store(hook, [inverses[i // 2] * x for i, x in enumerate(others)], scores, places)
    else:
        _store(hook, [divide(1.0, x) for x in divisors], scores, places)


def _store(hook: Pointwise, values: Sequence[Float32], scores: cute.Tensor, places: Places) -> None:
    """Weights of places, whose logistic functions have these values."""
    for (r, c, at), value in zip(places, values, strict=True):
        scores[r, c] = hook.element(at.but(score=scores[r, c], logistic=partial(_known, value)))


def _known(value: Float32, *arguments: Any) -> Float32:
    return value


def _arguments(hook: Pointwise, scores: cute.Tensor, places: Places) -> Arguments:
    """Arguments that the hook calls at.logistic with; the compiler drops what it would return."""
    found: list[tuple[Float32, ...]] = []

    def noted(*arguments: Any) -> Any:
        found.append(arguments)
        return arguments[0]

    for r, c, at in places:
        hook.element(at.but(score=scores[r, c], logistic=noted))
    return found


def _folded(values: list[Float32], fold: Callable[[Uint32, Uint32], Uint32]) -> Uint32:
    """The least or largest word of numbers, three at a time, as the chip compares them."""
    words = [x.bitcast(Uint32) for x in values]
    while len(words) > 1:
        triples = [words[i : i + 3] for i in range(0, len(words), 3)]
        words = [fold(fold(x[0], x[1]), x[2]) if len(x) == 3 else fold(x[0], x[-1]) for x in triples]
    return words[0]


def _word(x: float) -> Uint32:
    return Uint32(struct.unpack("<I", struct.pack("<f", x))[0])
