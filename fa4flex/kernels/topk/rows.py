"""Rows of scores, and their keys: int32 numbers in the order of the scores.

Finite scores and +inf have keys above NONE, of which equal scores, as 0.0 and -0.0, have the same. -inf and
NaN have NONE: they are not selected. So have units that are forced, which are selected anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, select_

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.plan.arguments import TOPK

NONE = -(1 << 31)
LOWEST = NONE + 1
"""No key of a unit that may be selected is lower."""

_Arguments: Any = named("TopkArguments", TOPK.read_by("kernel"))


class TopkArguments(_Arguments):
    """scores float32 [rows, units]; ids int32 [rows, k] and counts int32 [rows] are written. forced int32
    [own rows, 4], of which rows take turns, or None: see Forced."""


class Forced(NamedTuple):
    """Units [0, first), [begin, end) and [last, units), which are selected whatever their scores are."""

    first: Int32
    begin: Int32
    end: Int32
    last: Int32
    units: Int32

    @property
    def count(self) -> Int32:
        return self.first + (self.units - self.last) + (self.end - self.begin)

    def has(self, unit: Int32) -> Boolean:
        return (unit < self.first) | (unit >= self.last) | ((unit >= self.begin) & (unit < self.end))


def forced_of(arguments: TopkArguments, row: Int32, units: Int32) -> Forced | None:
    """Forced units of a row, in three runs that have no unit in common."""
    given = arguments.forced
    if given is None:
        return None
    mine = given[row % Int32(given.shape[0]), None]
    first = _within(mine[0], Int32(0), units)
    last = _within(mine[3], first, units)
    begin = _within(mine[1], first, last)
    return Forced(first, begin, _within(mine[2], begin, last), last, units)


def _within(x: Int32, least: Int32, most: Int32) -> Int32:
    return cutlass.max(cutlass.min(x, most), least)


def key_of(score: Float32, unit: Int32, forced: Forced | None) -> Int32:
    """The key of a unit's score."""
    bits = select_(score == 0.0, Int32(0), score.bitcast(Int32))
    key = bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))
    selectable = score > -Float32.inf  # not so NaN
    if forced is not None:
        selectable = selectable & ~forced.has(unit)
    return Int32(select_(selectable, key, Int32(NONE)))
