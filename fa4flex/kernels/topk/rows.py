"""Rows of scores, and their keys: int32 numbers in the order of the scores.

Finite scores and +inf have keys above NONE, of which equal scores, as 0.0 and -0.0, have the same. -inf and
NaN have NONE: they are not selected. So have units that a rule leaves out, and those that it forces, which
are selected anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, select_

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import where
from fa4flex.kernels.plan.arguments import TOPK

NONE = -(1 << 31)
LOWEST = NONE + 1
"""No key of a unit that may be selected is lower."""

_Arguments: Any = named("TopkArguments", TOPK.read_by("kernel"))


class TopkArguments(_Arguments):
    """scores float32 [rows, units]; ids int32 [rows, k] and counts int32 [rows] are written. Numbers of the
    rule, by which the first of every `rows` rows and those behind it stand for so many queries, or None:

    offset      position of the first query among the keys
    queries     of a row; keys: of a unit; kv_len: of all
    reach       queries from a row's first one up to the end of what may be selected
    more        keys up to which a unit may reach beyond that
    first, own  units that are selected whatever their scores are: the first ones of the keys, those up to
                each query's own one; last: and the last ones
    """


class Rule(NamedTuple):
    """Units [0, first), [begin, end) and [last, units) are selected whatever their scores are; others if
    they lie before `open`."""

    first: Int32
    begin: Int32
    end: Int32
    last: Int32
    open: Int32
    units: Int32

    @property
    def count(self) -> Int32:
        """Number of units that are selected whatever their scores are."""
        return self.first + (self.units - self.last) + (self.end - self.begin)

    def forces(self, unit: Int32) -> Boolean:
        return (unit < self.first) | (unit >= self.last) | ((unit >= self.begin) & (unit < self.end))


def rule_of(arguments: TopkArguments, row: Int32, units: Int32) -> Rule | None:
    """The rule of a row, whose forced units are in three runs that have none in common."""
    a = arguments
    if a.rows is None:
        return None
    start = a.offset + row % a.rows * a.queries
    end = start + a.reach
    open = where(end >= a.kv_len, units, _within((end + a.more) // a.keys, Int32(0), units))
    first = _within(a.first, Int32(0), units)
    last = _within(units - a.last, first, units)
    latest = cutlass.min(start + a.queries, a.kv_len) - 1
    own = a.own > 0
    begin = where(own, cutlass.max(start, Int32(0)) // a.keys + 1 - a.own, Int32(0))
    begin = _within(begin, first, last)
    end = _within(where(own, latest // a.keys + 1, Int32(0)), begin, last)
    return Rule(first, begin, end, last, open, units)


def _within(x: Int32, least: Int32, most: Int32) -> Int32:
    return cutlass.max(cutlass.min(x, most), least)


def key_of(score: Float32, unit: Int32, rule: Rule | None) -> Int32:
    """The key of a unit's score."""
    bits = select_(score == 0.0, Int32(0), score.bitcast(Int32))
    key = bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))
    selectable = score > -Float32.inf  # not so NaN
    if rule is not None:
        selectable = selectable & (unit < rule.open) & ~rule.forces(unit)
    return Int32(select_(selectable, key, Int32(NONE)))
