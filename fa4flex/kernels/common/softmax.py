"""Online softmax over tiles of scores (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, section 3.1).

Probabilities are exp2(factor * y - shift), where shift is factor times a maximum that may lag behind the true
one by `threshold` in log2 units (FlashAttention-4): sums and outputs then grow by at most 2^threshold. Nearly
all tiles leave the maxima as they are, and need neither a reduction over lanes nor a rescaling.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import cutlass
from cutlass import Boolean, Float32, cute, select_

from fa4flex.kernels.common.fragment import elements, numbers, quad_reduce, rows_and_columns
from fa4flex.kernels.common.hooks import At, Hooks

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -(2.0**25)
"""Least factor * y: below, all y of a row count as -inf. Steps of float32 are 4 there, so that probabilities
and gradients that come of the log-sum-exp mean nothing, and further down exponentials overflow."""


def factor_of(hooks: Hooks, at: At) -> Float32:
    """Factor of a head's scores in exponents of 2."""
    return at.scale * LOG2_E if hooks.factor is None else hooks.factor(at)


def sink_of(arguments: Any, h: Any, joins: Boolean | None = None) -> Float32 | None:
    """Sink of a head of queries, or None where there are no sinks. joins: False where another kernel merges
    this row with others and adds the sink there; absent: True."""
    if arguments.sinks is None:
        return None
    return _joining(arguments.sinks[h].to(Float32), joins)


def logit_of(hooks: Hooks, arguments: Any, h: Any, joins: Boolean | None = None) -> Float32 | None:
    """Logit that joins a head's denominators: its sink, or softpick's log(eps); None where there is none.
    joins: as of a sink."""
    if hooks.rectified:
        return _joining(Float32(math.log(hooks.eps)), joins)
    return sink_of(arguments, h, joins)


def _joining(logit: Float32, joins: Boolean | None) -> Float32:
    return logit if joins is None else select_(joins, logit, -Float32.inf)


def finite(largest: Float32) -> Float32:
    """`largest`, or 0 where it is -inf, as no key was seen."""
    return select_(largest == -Float32.inf, Float32(0.0), largest)


@dataclass(frozen=True)
class Running:
    """Per row of a thread: the `largest` y in use and `shift`, factor times it (0 while there is none); the
    `ceiling` that y may reach before the maximum is raised; this thread's share of the `total`; and `scale`,
    what the last raise multiplies the past by. Where they are asked for, the largest y that this thread has
    `seen`, and its share of the `moment`, the sum of probabilities times their logarithms of base 2."""

    largest: cute.Tensor
    shift: cute.Tensor
    ceiling: cute.Tensor
    total: cute.Tensor
    scale: cute.Tensor
    seen: cute.Tensor | None = None
    moment: cute.Tensor | None = None

    @property
    def rows(self) -> int:
        return cute.size(self.largest)

    def clear(self) -> None:
        """No key was seen yet: the first tile's maxima pass any ceiling."""
        for r in range(self.rows):
            self.largest[r] = -Float32.inf
            self.ceiling[r] = -Float32.inf
            self.shift[r] = Float32(0.0)
            self.total[r] = Float32(0.0)
            self.scale[r] = Float32(1.0)
            self.restart(r, -Float32.inf)

    def restart(self, r: int, seen: Float32) -> None:
        """Begin what statistics are made of, for a row of which no key but these maxima was taken."""
        if self.seen is not None:
            self.seen[r] = seen
        if self.moment is not None:
            self.moment[r] = Float32(0.0)

    def shift_to_merge(self) -> Float32:
        """Shift of the only row, or -inf while it has seen no key."""
        return select_(self.largest[0] == -Float32.inf, -Float32.inf, self.shift[0])


def running(rows: int, statistics: tuple[str, ...] = ()) -> Running:
    """Registers for so many rows, and those that the statistics need."""
    more = {"seen": "max_logit", "moment": "entropy"}
    numbers = [cute.make_rmem_tensor((rows,), Float32) for _ in range(5)]
    kept = {
        field: cute.make_rmem_tensor((rows,), Float32) for field, name in more.items() if name in statistics
    }
    return Running(*numbers, **kept)


@dataclass(frozen=True)
class OnlineSoftmax:
    """Softmax of a thread's rows while their scores come tile after tile. Four lanes share a row, as in
    accumulators of Hopper's products. `factor` of scores in exponents of 2; `threshold` in log2 units by
    which a score may pass the maximum in use before that is raised, and `slack` the same in units of y."""

    state: Running
    factor: Float32
    slack: Float32
    threshold: float

    online = True
    """True if outputs of earlier tiles are rescaled."""

    @classmethod
    def of(cls, hooks: Hooks, at: At, threshold: float, state: Running) -> Self:
        factor = factor_of(hooks, at)
        return cls(state, factor, threshold * cute.arch.rcp_approx(factor), threshold)

    def reduce(self, x: Float32, combine: Any) -> Float32:
        """Combine a number over the lanes that share a row."""
        return quad_reduce(x, combine)

    def maxima(self, scores: cute.Tensor) -> list[Float32]:
        """This thread's largest y per row of a tile, seen as (row, column)."""
        found = self.largest(scores)
        self.note(found)
        return found

    def largest(self, scores: cute.Tensor) -> list[Float32]:
        """This thread's largest score per row."""
        return [_largest(scores[r, None]) for r in range(self.state.rows)]

    def note(self, highest: list[Float32]) -> None:
        """Keep the largest y of all tiles, whatever maximum is in use."""
        seen = self.state.seen
        if seen is not None:
            for r, x in enumerate(highest):
                seen[r] = cute.arch.fmax(seen[r], x)

    def start(self, highest: list[Float32]) -> None:
        """Take the maxima of the first tile. A row without any finite score keeps -inf, and shift 0."""
        for r, x in enumerate(highest):
            self._use(self.reduce(x, cute.arch.fmax), r)
            self.state.total[r] = Float32(0.0)
            self.state.restart(r, x)

    def passes(self, highest: list[Float32]) -> Boolean:
        """True if maxima are to be raised: if any lane of the warp holds a y above a ceiling."""
        if self.threshold <= 0:
            return Boolean(True)
        return self._any_above(highest)

    def _any_above(self, highest: list[Float32]) -> Boolean:
        above = (x > self.state.ceiling[r] for r, x in enumerate(highest))
        return cute.arch.vote_any_sync(functools.reduce(operator.or_, above))

    def raise_maxima(self, highest: list[Float32]) -> None:
        """Take a tile's maxima into the running ones of rows whose ceilings they pass; rescale the totals.

        Other rows of the warp keep theirs: what a row's weights are rounded against, and so its bits, do not
        depend on the rows beside it, which may be those of another sequence.
        """
        state, taken = self.state, []
        for r, x in enumerate(highest):
            of_row = self.reduce(x, cute.arch.fmax)
            if self.threshold > 0:
                of_row = select_(of_row > state.ceiling[r], of_row, state.largest[r])
            taken.append(of_row)
        self.take_maxima(taken)

    def take_maxima(self, highest: list[Float32]) -> None:
        """Take maxima of whole rows into the running ones, whether they pass a ceiling or not."""
        state = self.state
        for r, x in enumerate(highest):
            before, shift = state.largest[r], state.shift[r]
            self._use(cute.arch.fmax(x, before), r)
            scale = cute.math.exp2(self.shift_of(before) - state.shift[r], fastmath=True)
            state.scale[r] = scale
            if state.moment is not None:
                state.moment[r] = (state.moment[r] - state.total[r] * (state.shift[r] - shift)) * scale
            state.total[r] = state.total[r] * scale

    def _use(self, largest: Float32, r: int) -> None:
        largest = select_(largest * self.factor < LOWEST, -Float32.inf, largest)
        self.state.largest[r] = largest
        self.state.ceiling[r] = largest + self.slack
        self.state.shift[r] = self.shift_of(finite(largest))

    def shift_of(self, largest: Float32) -> Float32:
        """Number that is taken from exponents of a row whose largest y this is."""
        return largest * self.factor

    def exponents(self, r: int) -> tuple[Float32, Float32]:
        """Factor of a row's scores in exponents of 2, and what is taken from these."""
        return self.factor, self.state.shift[r]

    def exponentiate(self, scores: cute.Tensor, is_finite: bool = False) -> None:
        """y of a tile, seen as (row, column), becomes its probability, up to the denominator, and part of its
        row's total. is_finite: no y is -inf."""
        state = self.state
        for r in range(state.rows):
            row = scores[r, None]
            factor, shift = self.exponents(r)
            logs = row.load() * factor - shift
            row.store(cute.math.exp2(logs, fastmath=True))
            state.total[r] = total_of(numbers(row), state.total[r])
            if state.moment is not None:
                of_base_2 = elements(logs, cute.size(row))
                state.moment[r] = moment_of(numbers(row), of_base_2, state.moment[r], is_finite)

    def finish(self, sink: Float32 | None) -> list[Finished]:
        """All rows, of heads that have this sink."""
        state, finished = self.state, []
        for r in range(state.rows):
            total = self.reduce(state.total[r], operator.add)
            finished.append(self.finished(state.largest[r], state.shift[r], total, sink))
        return finished

    def finished(self, largest: Float32, shift: Float32, total: Float32, sink: Float32 | None) -> Finished:
        """A row of these numbers."""
        return finish_row(largest, shift, total, sink)

    def entropies(self, sink: Float32 | None) -> list[Float32]:
        """The same rows' entropies, in nats."""
        state, found = self.state, []
        assert state.moment is not None
        for r in range(state.rows):
            total, moment = (self.reduce(x[r], operator.add) for x in (state.total, state.moment))
            found.append(entropy_of(state.largest[r] == -Float32.inf, state.shift[r], (total, moment), sink))
        return found


Rows = Sequence[OnlineSoftmax]
"""Rows of a thread, of which each may have a head, and so a factor, of its own."""


class LaneSoftmax(OnlineSoftmax):
    """Softmax of one row that a lane has to itself, as tensor memory hands it out."""

    def reduce(self, x: Float32, combine: Any) -> Float32:
        return x

    def _any_above(self, highest: list[Float32]) -> Boolean:
        # "All may stay" costs an instruction less than "any may not" on the way to the exponentials.
        return ~cute.arch.vote_all_sync(highest[0] <= self.state.ceiling[0])


def maxima(rows: Rows, scores: Sequence[cute.Tensor]) -> list[list[Float32]]:
    """This thread's largest y of each row of a tile, seen as (row, column) for each of `rows`."""
    return [one.maxima(mine) for one, mine in zip(rows, scores, strict=True)]


def passed(rows: Rows, highest: list[list[Float32]]) -> Boolean:
    """True if a tile's maxima are to be taken into the running ones, for all rows of the warp at once."""
    return functools.reduce(operator.or_, [one.passes(mine) for one, mine in zip(rows, highest, strict=True)])


def raise_maxima(rows: Rows, highest: list[list[Float32]]) -> list[Float32]:
    """Take a tile's maxima into the running ones; returns what outputs are to be multiplied by, by row."""
    for one, mine in zip(rows, highest, strict=True):
        one.raise_maxima(mine)
    return [one.state.scale[r] for one in rows for r in range(one.state.rows)]


@cute.jit
def take_maxima(rows: cutlass.Constexpr[Rows], scores: cutlass.Constexpr[Sequence[cute.Tensor]]) -> Boolean:
    """Raise the running maxima to a tile's where one is passed. Returns whether one was: outputs are to be
    rescaled then."""
    highest = maxima(rows, scores)
    raised = passed(rows, highest)
    if raised:
        raise_maxima(rows, highest)
    return raised


def take_all(rows: Rows, highest: Sequence[list[Float32]]) -> None:
    """Take maxima into the running ones of all rows, whether they pass a ceiling or not."""
    for one, mine in zip(rows, highest, strict=True):
        one.take_maxima([one.reduce(x, cute.arch.fmax) for x in mine])


def rescale(out: cute.Tensor, rows: Rows) -> None:
    """Multiply what an output has of earlier tiles by what the last raise of maxima says."""
    multiply_rows(rows_and_columns(out), [one.state.scale[r] for one in rows for r in range(one.state.rows)])


def _largest(row: cute.Tensor) -> Float32:
    """Four chains: a single one would wait for itself."""
    x = numbers(row)
    chains = x[:4]
    for i in range(4, len(x)):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], x[i])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def total_of(x: list[Float32], before: Float32) -> Float32:
    """`before` and the sum of a multiple of four numbers."""
    chains = [before + x[0], x[1], x[2], x[3]]
    for i in range(4, len(x)):
        chains[i % 4] = chains[i % 4] + x[i]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


class Finished(NamedTuple):
    """A row's last numbers: what its output is to be multiplied by, None for nothing, and the natural
    logarithm of its denominator."""

    scale: Float32 | None
    lse: Float32


def finish_row(largest: Float32, shift: Float32, total: Float32, sink: Float32 | None) -> Finished:
    """`sink` is a logit that joins the denominator and has no value. A row without keys, whose `largest` is
    -inf, gives 0 and -inf."""
    empty: Boolean = largest == -Float32.inf
    if sink is None:
        scale = select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
        log2 = shift + cute.math.log2(total, fastmath=True)
        return Finished(scale, select_(empty, -Float32.inf, log2 * LN_2))
    # Relative to the larger of both, so that neither exponential overflows.
    logit = sink * LOG2_E
    common = finite(select_(empty, logit, cute.arch.fmax(shift, logit)))
    grown = select_(empty, Float32(0.0), total * cute.math.exp2(shift - common, fastmath=True))
    everything = grown + cute.math.exp2(logit - common, fastmath=True)
    scale = cute.math.exp2(shift - common, fastmath=True) * cute.arch.rcp_approx(everything)
    scale = select_(empty, Float32(0.0), scale)
    return Finished(scale, (common + cute.math.log2(everything, fastmath=True)) * LN_2)


FAR = -1000.0
"""Logarithm of base 2 of probabilities that are 0, instead of -inf, which times 0 is NaN."""


def moment_of(
    probabilities: list[Float32], logs: list[Float32], before: Float32, is_finite: bool = False
) -> Float32:
    """`before` and the sum of probabilities times their logarithms of base 2, of which none is -inf if
    `is_finite`."""
    chains = [before, Float32(0.0), Float32(0.0), Float32(0.0)]
    for i, (p, log) in enumerate(zip(probabilities, logs, strict=True)):
        chains[i % 4] = chains[i % 4] + p * (log if is_finite else cute.arch.fmax(log, Float32(FAR)))
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


def entropy_of(
    empty: Boolean, shift: Float32, sums: tuple[Float32, Float32], sink: Float32 | None
) -> Float32:
    """Entropy in nats of a row whose (total, moment) are relative to `shift`: log2(total) - moment / total in
    units of log(2). A sink has its part in it; a row without keys and sink gives 0."""
    total, moment = (select_(empty, Float32(0.0), x) for x in sums)
    if sink is not None:
        logit = sink * LOG2_E
        common = finite(select_(empty, logit, cute.arch.fmax(shift, logit)))
        by = select_(empty, Float32(0.0), common - shift)
        log = logit - common
        own, kept = (cute.math.exp2(x, fastmath=True) for x in (log, -by))
        moment = (moment - total * by) * kept + own * cute.arch.fmax(log, Float32(FAR))
        total = total * kept + own
    nothing = total == Float32(0.0)
    safe = select_(nothing, Float32(1.0), total)
    entropy = cute.math.log2(safe, fastmath=True) - moment * cute.arch.rcp_approx(safe)
    return select_(nothing, Float32(0.0), cute.arch.fmax(entropy, Float32(0.0)) * LN_2)


def multiply_rows(acc: cute.Tensor, scales: list) -> None:
    """Multiply each row of an accumulator, seen as (row, column), where there is something to multiply by."""
    for r, scale in enumerate(scales):
        if scale is None:
            continue
        row = acc[r, None]
        row.store(row.load() * scale)
