"""From a mask to the keys each query row attends: a union of half-open key intervals, found symbolically; and
by the same rules, with the two indices exchanged, to the queries that attend each key.

`q >= kv` becomes [0, q + 1); `q - kv < w` becomes [q - w + 1, kv_len); documents with sorted ids become
[search_left(ids, ids[q]), search_right(ids, ids[q])). The result is exactly the mask, element by element,
so a kernel may compute its key ranges itself and a plan needs O(rows) work instead of O(rows * keys).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fa4flex.codegen.analyze.linear import Linear, linear, nonnegative
from fa4flex.codegen.expr import FALSE, TRUE, Expr, apply, const, load, nodes, search, substitute, sym

MOST_INTERVALS = 8
"""Intervals of a row that are found symbolically."""

MOST_SPANS = 2
"""Intervals of a row that kernels compute themselves; masks of more are read from tables."""

_KV, _KV_LEN = sym("kv"), sym("kv_len")
_ONE = Linear((), 1)
Span = tuple[Expr | None, Expr | None]
Spans = tuple[Span, ...]
_EVERYTHING: Spans = ((None, None),)
_NOTHING: Spans = ()


@dataclass(frozen=True)
class Intervals:
    """A union of [lo, hi), which may overlap; one with lo >= hi is empty.

    It equals the mask when every operand in `sorted_operands` is non-decreasing along its last dimension and
    every expression in `nonnegative` is >= 0 for all elements of the problem: whoever uses it checks both.
    """

    spans: tuple[tuple[Expr, Expr], ...]
    sorted_operands: frozenset[int] = frozenset()
    nonnegative: tuple[Expr, ...] = ()

    @property
    def certain(self) -> bool:
        """True if there is nothing to check."""
        return not self.sorted_operands and not self.nonnegative


@dataclass(frozen=True)
class KeyIntervals(Intervals):
    """Row (b, h, q) attends exactly the keys in them, each clipped to [0, kv_len). Ends are free of `kv`."""


@dataclass(frozen=True)
class QueryIntervals(Intervals):
    """Key (b, h, kv) is attended by exactly the queries in them, each clipped to [0, q_len). Ends are free of
    `q`."""


class _NoIntervals(Exception):
    """The mask, or what is asked of it, is not a union of a few intervals that we can name."""


def key_intervals(mask: Expr) -> KeyIntervals | None:
    """The key intervals of a mask (a bool expression), or None where they are not found."""
    solver = _Solver()
    try:
        spans = solver.spans(mask, True)
    except (_NoIntervals, RecursionError):
        return None
    named = tuple((const(0) if lo is None else lo, _KV_LEN if hi is None else hi) for lo, hi in spans)
    return KeyIntervals(named, frozenset(solver.sorted_operands), tuple(solver.nonnegative))


def allowed_keys(mask: Expr) -> KeyIntervals | None:
    """Key intervals whose keys a mask allows, with nothing to check, or None where none are found. It may
    allow others: of alternatives, only those that are intervals are looked at."""
    certain = [x for x in _alternatives(mask) if _is_certain(key_intervals(x))]
    if not certain:
        return None
    result = key_intervals(functools.reduce(lambda a, b: apply("or_", a, b), certain))
    return result if _is_certain(result) else None


def _alternatives(mask: Expr) -> list[Expr]:
    """Expressions of which one has to be true."""
    return [x for arg in mask.args for x in _alternatives(arg)] if mask.op == "or_" else [mask]


def _is_certain(keys: KeyIntervals | None) -> bool:
    return keys is not None and keys.certain and 0 < len(keys.spans) <= MOST_SPANS


_EXCHANGED = {sym(a): sym(b) for a, b in (("q", "kv"), ("kv", "q"), ("q_len", "kv_len"), ("kv_len", "q_len"))}


def query_intervals(mask: Expr) -> QueryIntervals | None:
    """The query intervals of a mask, or None where they are not found."""
    result = key_intervals(substitute(mask, _EXCHANGED))
    if result is None:
        return None
    spans = tuple((substitute(lo, _EXCHANGED), substitute(hi, _EXCHANGED)) for lo, hi in result.spans)
    nonnegative = tuple(substitute(x, _EXCHANGED) for x in result.nonnegative)
    return QueryIntervals(spans, result.sorted_operands, nonnegative)


def searched(keys: Intervals) -> tuple[Expr, ...]:
    """The elements of what the ends search, in their order: those at `kv`, for all numbers below the size of
    their captured tensor's last dimension. The intervals hold where none is less than the one before."""
    results = (node for node in nodes(*(end for span in keys.spans for end in span)) if node.op == "search")
    rows = dict.fromkeys((node.value[0], node.args[1:]) for node in results)
    return tuple(load(slot, (*lead, _KV), "int") for slot, lead in rows)


def describe(keys: KeyIntervals) -> str:
    """The intervals in words, one line per span and one per condition."""
    if not keys.spans:
        return "no row attends any key"
    parts = [f"keys from {lo} up to, not including, {hi}" for lo, hi in keys.spans]
    lines = ["row (b, h, q) attends " + ("\n  and ".join(parts))]
    lines += [f"provided t{slot} is sorted along its last dimension" for slot in sorted(keys.sorted_operands)]
    lines += [f"provided {x} >= 0" for x in keys.nonnegative]
    return "\n".join(lines)


# --- sets of intervals ----------------------------------------------------------------------------------


def _extreme(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """The tighter of two ends, where None means no end at all."""
    return b if a is None else a if b is None else apply(op, a, b)


def _unite(a: Spans, b: Spans) -> Spans:
    below: Expr | None = None
    above: Expr | None = None
    inner: list[Span] = []
    for lo, hi in a + b:
        if lo is None and hi is None:
            return _EVERYTHING
        if lo is None:
            below = _extreme("maximum", below, hi)
        elif hi is None:
            above = _extreme("minimum", above, lo)
        elif (lo, hi) not in inner:
            inner.append((lo, hi))
    spans = [(None, below)] * (below is not None) + inner + [(above, None)] * (above is not None)
    if len(spans) > MOST_INTERVALS:
        raise _NoIntervals
    return tuple(spans)


def _intersect(a: Spans, b: Spans) -> Spans:
    united: Spans = _NOTHING
    for lo, hi in a:
        for other_lo, other_hi in b:
            united = _unite(united, ((_extreme("maximum", lo, other_lo), _extreme("minimum", hi, other_hi)),))
    return united


def _switch(condition: Expr) -> Spans:
    """A condition free of kv turns whole rows on or off."""
    if condition is TRUE or condition is FALSE:
        return _EVERYTHING if condition is TRUE else _NOTHING
    return ((apply("where", condition, const(0), _KV_LEN), None),)


# --- solving for kv -------------------------------------------------------------------------------------


class _Solver:
    def __init__(self) -> None:
        self.sorted_operands: set[int] = set()
        self.nonnegative: list[Expr] = []
        self._memo: dict[tuple[Expr, bool], Spans] = {}

    def spans(self, condition: Expr, wanted: bool) -> Spans:
        """The keys for which `condition == wanted`."""
        key = (condition, wanted)
        if key not in self._memo:
            if "kv" in condition.free:
                self._memo[key] = self._solve(condition, wanted)
            else:
                self._memo[key] = _switch(condition if wanted else apply("not_", condition))
        return self._memo[key]

    def _solve(self, condition: Expr, wanted: bool) -> Spans:
        op, args = condition.op, condition.args
        match op:
            case "not_":
                return self.spans(args[0], not wanted)
            case "and_" | "or_":
                join = _intersect if (op == "and_") == wanted else _unite
                return join(self.spans(args[0], wanted), self.spans(args[1], wanted))
            case "xor":
                return self._differ(args[0], args[1], wanted)
            case "eq" | "ne" if args[0].kind == "bool":
                return self._differ(args[0], args[1], wanted == (op == "ne"))
            case "eq" | "ne" if args[0].kind == "int":
                return self._equal(linear(args[0]) - linear(args[1]), wanted == (op == "eq"))
            case "lt" | "le" if args[0].kind == "int":
                return self._negative(linear(args[0]) - linear(args[1]) - _ONE * (op == "le"), wanted)
            case "to_bool" if args[0].kind == "int":
                return self._equal(linear(args[0]), not wanted)
            case "reduce":
                return self._reduced(condition, wanted)
        raise _NoIntervals

    def _differ(self, a: Expr, b: Expr, wanted: bool) -> Spans:
        """Keys for which (a != b) == wanted."""
        with_b, without_b = self.spans(b, not wanted), self.spans(b, wanted)
        return _unite(_intersect(self.spans(a, True), with_b), _intersect(self.spans(a, False), without_b))

    def _equal(self, form: Linear, wanted: bool) -> Spans:
        """Keys for which (form == 0) == wanted: not below 0, and below 1."""
        join = _intersect if wanted else _unite
        return join(self._negative(form, not wanted), self._negative(form - _ONE, wanted))

    def _reduced(self, node: Expr, wanted: bool) -> Spans:
        how, axis, extent = node.value
        if how not in ("any", "all") or extent > MOST_INTERVALS:
            raise _NoIntervals
        joined = _switch(const(how == "all"))
        for i in range(extent):
            term = substitute(node.args[0], {sym(axis): const(i)})
            joined = (_unite if how == "any" else _intersect)(joined, self.spans(term, True))
        return joined if wanted else _complement(joined)

    def _negative(self, form: Linear, wanted: bool) -> Spans:
        """Keys for which (form < 0) == wanted."""
        moving = [(atom, c) for atom, c in form.terms if "kv" in atom.free]
        if not moving:
            condition = apply("lt", form.expr(), const(0))
            return _switch(condition if wanted else apply("not_", condition))
        if len(moving) > 1:
            raise _NoIntervals
        atom, coefficient = moving[0]
        rest = Linear(tuple(term for term in form.terms if term[0] is not atom), form.constant)
        if coefficient > 0:  # atom < ceil(-rest / coefficient)
            return self._below(atom, _ceil_ratio(-rest, coefficient), wanted)
        # rest < -coefficient * atom, so atom >= floor(rest / -coefficient) + 1
        bound = rest if coefficient == -1 else linear(apply("floordiv", rest.expr(), const(-coefficient)))
        return self._below(atom, bound + _ONE, not wanted)

    def _below(self, atom: Expr, bound: Linear, wanted: bool) -> Spans:
        """Keys for which (atom < bound) == wanted."""
        if atom is _KV:
            end = bound.expr()
            return ((None, end),) if wanted else ((end, None),)
        args = atom.args
        match atom.op:
            case "floordiv" if self._positive(args[1]):  # x // m < u  <=>  x < u * m
                return self._negative(linear(args[0]) - linear(apply("mul", bound.expr(), args[1])), wanted)
            case "shr" if args[1].op == "const" and 0 <= args[1].value < 61:
                return self._negative(linear(args[0]) - bound * (1 << args[1].value), wanted)
            case "mul":
                x, factor = args if "kv" in args[0].free else args[::-1]
                if self._positive(factor):
                    ceiling = apply("neg", apply("floordiv", (-bound).expr(), factor))
                    return self._negative(linear(x) - linear(ceiling), wanted)
            case "abs":
                join = _intersect if wanted else _unite
                inner = linear(args[0])
                return join(self._negative(inner - bound, wanted), self._negative(-inner - bound, wanted))
            case "minimum" | "maximum":
                join = _unite if (atom.op == "minimum") == wanted else _intersect
                return join(*(self._negative(linear(x) - bound, wanted) for x in args))
            case "where":
                return self._chosen(args[0], args[1], args[2], bound, wanted)
            case "to_int" if args[0].kind == "bool":
                return self._chosen(args[0], const(1), const(0), bound, wanted)
            case "load" if not any("kv" in i.free for i in args[:-1]):
                return self._looked_up(atom, bound, wanted)
        raise _NoIntervals

    def _chosen(self, c: Expr, x: Expr, y: Expr, bound: Linear, wanted: bool) -> Spans:
        first = _intersect(self.spans(c, True), self._negative(linear(x) - bound, wanted))
        return _unite(first, _intersect(self.spans(c, False), self._negative(linear(y) - bound, wanted)))

    def _looked_up(self, load: Expr, bound: Linear, wanted: bool) -> Spans:
        """t[i] < u  <=>  i < how many elements are below u, in a sorted table and for i >= 0."""
        *lead, index = load.args
        self.sorted_operands.add(load.value)
        if not nonnegative(index):  # a negative index would wrap round to the end of the table
            self._assume(index)
        if bound.constant == 1:
            position = search(load.value, "right", (bound - _ONE).expr(), lead)
        else:
            position = search(load.value, "left", bound.expr(), lead)
        return self._negative(linear(index) - linear(position), wanted)

    def _positive(self, x: Expr) -> bool:
        if "kv" in x.free:
            return False
        if x.op != "const":
            self._assume(apply("sub", x, const(1)))
        return x.op != "const" or x.value > 0

    def _assume(self, x: Expr) -> None:
        if x not in self.nonnegative:
            self.nonnegative.append(x)


def _ceil_ratio(numerator: Linear, denominator: int) -> Linear:
    if denominator == 1:
        return numerator
    return -linear(apply("floordiv", (-numerator).expr(), const(denominator)))


def _complement(spans: Spans) -> Spans:
    outside = _EVERYTHING
    for lo, hi in spans:
        left: Spans = () if lo is None else ((None, lo),)
        right: Spans = () if hi is None else ((hi, None),)
        outside = _intersect(outside, _unite(left, right))
    return outside
