"""Bounds of a mask over a tile, as expressions: what a device computes to tell empty, partial and full tiles.

The rules are those of interval arithmetic (see rules.py), applied to the expression itself and not to
numbers. In the result, `q` and `kv` are the first query and the first key of a tile. What depends on queries
alone, or on keys alone, is evaluated for each of a tile's rows, and the least and greatest value stand in a
table of ranges: `bounds` reads them as captured tensors behind those of the program.

An operation without a rule may be anything. Where bounds leave a tile open, the mask itself decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import isqrt, prod
from typing import Literal

from fa4flex.codegen.analyze.linear import linear
from fa4flex.codegen.analyze.rules import Bounds, rule_for
from fa4flex.codegen.evaluate import MODEST
from fa4flex.codegen.expr import (
    FALSE,
    READS,
    SYMBOLS,
    TRUE,
    Expr,
    Kind,
    apply,
    const,
    folded,
    load,
    reduce,
    sym,
    to_int,
)
from fa4flex.codegen.formula import Formula

MOST_READ = 16
"""Elements of a captured tensor that are read for one tile."""

MOST_RANGES = 8
"""Ranges that are kept per tile of queries or keys."""

Side = Literal["q", "kv"]
Ends = tuple[Expr, Expr]
"""Least and greatest value over a tile; of a bool, whether it certainly holds and whether it may."""

_LENGTHS: dict[str, Expr] = {"q": sym("q_len"), "kv": sym("kv_len")}
_ANYTHING: Ends = (FALSE, TRUE)


@dataclass(frozen=True)
class TileBounds:
    """free                symbols that the mask depends on
    certain, possible   whether all pairs of a tile take part, and whether some may
    ranges                 integers whose least and greatest value over a tile are read: number i of them from
                           operands first + 2 i and first + 2 i + 1, int32 [B, H, tiles], at the tile of the
                           queries or keys that it depends on, and at b = 0, h = 0 where not on these
    ragged                 sequences have lengths of their own, past which ranges do not look: these differ by
                           sequence
    """

    tile: tuple[int, int]
    free: frozenset[str]
    first: int
    certain: Expr
    possible: Expr
    ranges: tuple[Expr, ...]
    ragged: bool = False

    def side(self, i: int) -> Side:
        """Side that index range i depends on."""
        return "q" if "q" in self.ranges[i].free else "kv"

    def varies(self, i: int) -> tuple[bool, bool]:
        """Dependence of range i on b, and on h."""
        return self.ragged or "b" in self.ranges[i].free, "h" in self.ranges[i].free


@lru_cache(maxsize=512)
def tile_bounds(
    mask: Expr,
    tile: tuple[int, int],
    operands: int,
    ranges: bool = True,
    large: frozenset[int] = frozenset(),
    ragged: bool = False,
) -> TileBounds:
    """Bounds of `mask` over tiles of `tile` queries and keys, in a program of so many captured tensors.
    ranges: whether tables of ranges may be read; where numbers have 64 bits, they may not. large: slots of
    captured integers that are not all below MODEST."""
    rules = _Rules(tile, operands, MOST_RANGES if ranges else 0, large, ragged)
    certain, possible = rules.truth(mask)
    return TileBounds(tile, mask.free, operands, certain, possible, tuple(rules.ranges), ragged)


class _Rules:
    def __init__(
        self, tile: tuple[int, int], first: int, most_ranges: int, large: frozenset[int], ragged: bool
    ) -> None:
        self._size = dict(zip(("q", "kv"), tile, strict=True))
        self._first, self._most = first, most_ranges
        self._large = large
        self._always = {"b"} if ragged else set()
        self.ranges: list[Expr] = []
        self._memo: dict[Expr, Ends | None] = {}

    def truth(self, x: Expr) -> Ends:
        return self.ends(x) or _ANYTHING

    def ends(self, x: Expr) -> Ends | None:
        """None where nothing is known."""
        if x not in self._memo:
            self._memo[x] = self._ends(x)
        return self._memo[x]

    def _ends(self, x: Expr) -> Ends | None:
        moving = x.free & {"q", "kv"}
        if not moving and x.free <= set(SYMBOLS):
            return x, x
        if x.op == "sym":
            return self._index(x)
        if len(moving) == 1 and x.free <= set(SYMBOLS) and not self._exact(x):
            result = self._range(x)
            if result is not None:
                return result
        if x.op in READS:
            return self._read(x) if x.op == "load" else None
        if x.op == "reduce":
            return self._reduced(x)
        if x.kind == "float" and x.op != "to_float":
            return None  # sums of ends round in other ways than what lies between
        rule = _RULES.get((x.op, x.args[0].kind)) or _RULES.get((x.op, "any"))
        if rule is None:
            return None
        arguments = [self.ends(a) for a in x.args]
        if x.kind == "bool" and x.op != "ne" and all(a.kind == "bool" for a in x.args):
            arguments = [result or _ANYTHING for result in arguments]
        return None if any(result is None for result in arguments) else rule(*arguments)

    def _index(self, x: Expr) -> Ends | None:
        if x.value not in self._size:
            return x, x  # the axis of a reduction
        end = apply("minimum", apply("add", x, const(self._size[x.value])), _LENGTHS[x.value])
        return x, apply("sub", end, const(1))

    def _exact(self, x: Expr) -> bool:
        """True if the rules find the very ends of what depends on one index: it is a multiple of it and more,
        or rises with such."""
        if x.kind == "bool":
            return x.op in ("lt", "le", "not_", "to_bool") and all(
                self._exact(a) or not _moves(a) for a in x.args
            )
        if x.kind == "float":
            return x.op == "to_float" and self._exact(x.args[0])
        if x.op == "floordiv":
            return not _moves(x.args[1]) and self._exact(x.args[0])
        moving = [atom for atom, _ in linear(x).terms if _moves(atom)]
        return len(moving) == 1 and moving[0].op == "sym"

    def _range(self, x: Expr) -> Ends | None:
        """The ends as they stand in a table."""
        if x.kind == "float" or x.op == "sym":
            return None
        number = to_int(x)
        if number not in self.ranges:
            if len(self.ranges) == self._most:
                return None
            self.ranges.append(number)
        i = self.ranges.index(number)
        index = "q" if "q" in x.free else "kv"
        at = [sym(name) if name in x.free | self._always else const(0) for name in ("b", "h")]
        place = (*at, apply("floordiv", sym(index), const(self._size[index])))
        lo, hi = (load(self._first + 2 * i + end, place, "int") for end in (0, 1))
        return (lo, hi) if x.kind == "int" else (apply("ne", lo, const(0)), apply("ne", hi, const(0)))

    def _reduced(self, x: Expr) -> Ends | None:
        how, axis, extent = x.value
        inner = self.ends(x.args[0])
        if inner is None or how == "prod" or x.kind == "float":
            return None
        return reduce(how, axis, extent, inner[0]), reduce(how, axis, extent, inner[1])

    # --- elements of captured tensors -------------------------------------------------------------------

    def _read(self, x: Expr) -> Ends | None:
        """The least and greatest of the few elements that a tile may read; of an index that goes no one knows
        how far, the first few, if there are no more."""
        spans = [self._span(index) for index in x.args]
        if x.kind == "float" or (None in spans and x.value in self._large):
            return None
        most = {0: 1, 1: MOST_READ, 2: isqrt(MOST_READ)}.get(spans.count(None), 1)
        if prod(most if span is None else span + 1 for span in spans) > MOST_READ:
            return None
        places: list[list[Expr]] = []
        known: Expr = TRUE
        for index, span in zip(x.args, spans, strict=True):
            ends = self.ends(index)
            if ends is None:
                return None
            lo, hi = ends
            count = most if span is None else span + 1
            steps = (apply("add", lo, const(step)) for step in range(count))
            places.append([apply("minimum", step, hi) for step in steps] if count > 1 else [lo])
            if span is None:
                known = apply("and_", known, apply("lt", apply("sub", hi, lo), const(count)))
        elements = [load(x.value, place, x.kind) for place in product(*places)]
        return _if_known(known, elements, x.kind)

    def _span(self, x: Expr) -> int | None:
        """Upper bound of an integer's span within a tile; None where it is not known."""
        if not _moves(x):
            return 0
        match x.op:
            case "sym":
                return self._size[x.value] - 1
            case "add" | "sub" | "minimum" | "maximum":
                spans = [self._span(a) for a in x.args]
                if None in spans:
                    return None
                return sum(spans) if x.op in ("add", "sub") else max(spans)  # type: ignore[arg-type, type-var]
            case "neg":
                return self._span(x.args[0])
            case "mul":
                factor = next((a for a in x.args if a.op == "const"), None)
                span = None if factor is None else self._span(next(a for a in x.args if a is not factor))
                return None if span is None or factor is None else span * abs(factor.value)
            case "floordiv" if _positive(x.args[1]):
                return self._span_of_ratio(x.args[0], x.args[1].value)
            case "shr" if x.args[1].op == "const" and 0 <= x.args[1].value < 31:
                return self._span_of_ratio(x.args[0], 1 << x.args[1].value)
            case "mod" if _positive(x.args[1]):
                return int(x.args[1].value) - 1
        return None

    def _span_of_ratio(self, x: Expr, by: int) -> int | None:
        if x.op == "sym" and (self._size[x.value] % by == 0 or by % self._size[x.value] == 0):
            return (self._size[x.value] - 1) // by  # tiles begin where quotients change, or lie inside of one
        span = self._span(x)
        return None if span is None else (span + by - 1) // by


def _if_known(known: Expr, elements: Sequence[Expr], kind: Kind) -> Ends:
    """The least and greatest of elements, if they are all; else any number below MODEST."""
    if kind == "bool":
        some = apply("or_", apply("not_", known), folded("or_", elements))
        return apply("and_", known, folded("and_", elements)), some
    ends = ("minimum", 1 - MODEST), ("maximum", MODEST - 1)
    lo, hi = (apply("where", known, folded(op, elements), const(beyond)) for op, beyond in ends)
    return lo, hi


def _moves(x: Expr) -> bool:
    return bool(x.free & {"q", "kv"})


def _positive(x: Expr) -> bool:
    return x.op == "const" and x.kind == "int" and x.value > 0


# --- rules ------------------------------------------------------------------------------------------------


def _of(op: str, kind: str) -> Callable[..., Ends]:
    """The rule of rules.py, for ends that are expressions."""
    rule = rule_for(op, kind)

    def ends(*arguments: Ends) -> Ends:
        result = rule(*(Bounds(*map(Formula, argument)) for argument in arguments))
        return result.lo.expr, result.hi.expr

    return ends


def _rising(op: str) -> Callable[..., Ends]:
    return lambda *ends: (apply(op, *(lo for lo, _ in ends)), apply(op, *(hi for _, hi in ends)))


def _hull(values: Sequence[Expr]) -> Ends:
    values = list(dict.fromkeys(values))
    return folded("minimum", values), folded("maximum", values)


def _mul(a: Ends, b: Ends) -> Ends:
    for x, y in ((a, b), (b, a)):
        if x[0] is x[1] and x[0].op == "const":
            ends = apply("mul", y[0], x[0]), apply("mul", y[1], x[0])
            return ends if x[0].value >= 0 else ends[::-1]
    return _hull([apply("mul", x, y) for x in a for y in b])


def _shr(a: Ends, b: Ends) -> Ends | None:
    by = b[0]
    if by is not b[1] or by.op != "const" or by.value < 0:
        return None
    return apply("shr", a[0], by), apply("shr", a[1], by)


def _floordiv(a: Ends, b: Ends) -> Ends | None:
    """Quotients by one divisor: they rise with the numerator, or fall."""
    by = b[0]
    if by is not b[1]:
        return None
    ends = apply("floordiv", a[0], by), apply("floordiv", a[1], by)
    return ends if _positive(by) else _hull(ends)


def _mod(a: Ends, b: Ends) -> Ends | None:
    """Within one period of a divisor the remainder rises; else it is any remainder."""
    by = b[0]
    if by is not b[1] or not _positive(by):
        return None
    same = apply("eq", *(apply("floordiv", end, by) for end in a))
    lo, hi = (apply("mod", end, by) for end in a)
    return apply("where", same, lo, const(0)), apply("where", same, hi, const(by.value - 1))


_not, _xor, _differ = _of("not_", "bool"), _of("xor", "bool"), _of("ne", "int")

_RULES: dict[tuple[str, str], Callable[..., Ends | None]] = {
    **{(op, "int"): _of(op, "int") for op in ("add", "sub", "neg", "abs", "minimum", "maximum")},
    **{(op, "bool"): _of(op, "bool") for op in ("not_", "and_", "or_", "xor", "where")},
    **{(op, "any"): _of(op, "int") for op in ("lt", "le", "eq", "ne")},
    ("mul", "int"): _mul,
    ("floordiv", "int"): _floordiv,
    ("shr", "int"): _shr,
    ("mod", "int"): _mod,
    ("to_int", "bool"): _rising("to_int"),
    ("to_float", "int"): _rising("to_float"),
    ("to_bool", "int"): lambda a: _differ(a, (const(0), const(0))),
    ("eq", "bool"): lambda a, b: _not(_xor(a, b)),
    ("ne", "bool"): _xor,
}
"""Rules, by operation and kind of the first argument."""
