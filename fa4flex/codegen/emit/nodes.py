"""Expressions as a device computes them: Expr nodes, with leaves and operations that no mod can name.

SCORE        the accumulated q.k, before the scale (in a traced mod, the same symbol is after it)
SCALE        the launch's scale
OFFSET       kv - q
KV_BASE, OFFSET_BASE   what all keys or offsets of a tile share; each adds a step known to the compiler
wrapped      an index that may be negative, counted from the end of dimension `value[1]` of operand `value[0]`
confined     the same, clamped into the dimension
divisor      a run-time divisor, prepared; divided: a floor division by one
natural_div  a floor division of a number >= 0 by a constant > 0
reciprocal, signum (-1.0 or 1.0)
exact_ratio  a correctly rounded quotient of floats; floor_quotient, remainder: torch's // and % of floats
saturated    x * factor + addend, within [0, 1]
shared       a value as it is, whose coefficients stay where they are: something else is computed from it, too
difference   a - b of what changes with the query and what changes with the key, before any factor
stepped      x * coefficient + rest, where x is an index as a float
near         a load at `args` plus steps: value[1] is how many of which index, by dimension; value[2]: the key
             itself is the last dimension, and no other one takes steps
logistic     the logistic function of a weight, by the arguments of kernels/common/logistic.py; value: which
reduce with COLLECT   the values for every i of an axis, as a tuple; element_of is the one for i
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from fa4flex.codegen.expr import SYMBOLS, Expr, Kind, _node, apply, const, scalar, sym, walk
from fa4flex.codegen.ops import COMPARISONS, OPS
from fa4flex.errors import Origin

Rate = Literal["uniform", "row", "column", "diagonal", "pair", "element"]
RATES: tuple[Rate, ...] = ("uniform", "row", "column", "diagonal", "pair", "element")

SCORE, Q, KV, OFFSET = sym("score"), sym("q"), sym("kv"), sym("offset")
KV_BASE, OFFSET_BASE = sym("kv_base"), sym("offset_base")
BASES = {KV: KV_BASE, OFFSET: OFFSET_BASE}
SCALE = scalar(-1, "float")
ONE = const(1.0)
COLLECT = "collect"
LOG2_E = 1.4426950408889634

_MOVING: dict[frozenset[str], Rate] = {
    frozenset(): "uniform",
    frozenset(("q",)): "row",
    frozenset(("kv",)): "column",
    frozenset(("offset",)): "diagonal",
}
_BASE_OF = {"kv_base": "kv", "offset_base": "offset"}
_MOVES = frozenset(("q", "kv", "offset"))
DEVICE_SYMBOLS = frozenset((*SYMBOLS, "offset", *_BASE_OF))


def device(op: str, *args: Expr, value: object = None, kind: Kind = "float") -> Expr:
    """A node as it stands: nothing is promoted or simplified."""
    return _node(op, args, value, kind)


def credit(root: Expr, origin: Origin | None, came: dict[Expr, Origin | None]) -> None:
    """Enter in `came` that new nodes under `root` come from a line of the user's code."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node not in came:
            came[node] = origin
            stack.extend(node.args)


def rate(x: Expr) -> Rate:
    """Rate at which x changes while a tile is computed."""
    if "score" in x.free:
        return "element"
    return _MOVING.get(frozenset(_BASE_OF.get(name, name) for name in x.free) & _MOVES, "pair")


def is_leaf(x: Expr) -> bool:
    """True if x costs nothing where it is used: a field of `at`, or a number."""
    if x.op == "to_float":
        return x.args[0] in (Q, KV, OFFSET)
    return not x.args and x.op not in LOADS and x.op != "reduce"


LOADS = frozenset(("load", "near"))
_SLOW = LOADS | {"search", "reduce", "stepped", "reciprocal"}


def keeps(x: Expr) -> bool:
    """True if a value for each pair is worth a register until the scores are there: not if it is arithmetic
    on what is kept anyway."""
    return any(rate(node) == "pair" and _is_slow(node.op) for node in walk(x))


def _is_slow(op: str) -> bool:
    return OPS[op].slow if op in OPS else op in _SLOW


def jumps(x: Expr) -> bool:
    """True if an error of its floats, however small, may move the value by a whole step."""
    return x.op in _JUMPS and x.args[0].kind == "float"


_JUMPS = COMPARISONS | {
    "floor", "ceil", "round", "trunc", "to_int", "exact_ratio", "floor_quotient", "remainder",
}  # fmt: skip


def axes(x: Expr) -> frozenset[str]:
    """The reduction axes that x varies with."""
    return x.free - DEVICE_SYMBOLS


SHORT, LONGEST = 3, 32
"""Terms of a fold that the compiler writes out, for each pair and for what is less; a longer one is a loop of
the device. With 4 terms of two loads each, written out, both passes take half a minute to compile."""


@lru_cache(maxsize=4096)
def repeats(x: Expr) -> bool:
    """True if the fold x is a loop of the device: written out, its terms would be code without end."""
    most = SHORT if rate(x) == "pair" else LONGEST
    return x.value[0] != COLLECT and x.value[2] * _written_out(x) > most


def _written_out(loop: Expr) -> int:
    """Terms that one round of a loop writes out: those of the longest one inside that varies with it."""
    inside = (x for x in walk(*loop.args) if x.op == "reduce" and loop.value[1] in x.free and not repeats(x))
    return max((x.value[2] * _written_out(x) for x in inside), default=1)


def power_of_two(x: Expr) -> int | None:
    """k where x is the constant 2^k."""
    if x.op != "const" or x.kind != "int" or x.value <= 0 or x.value & (x.value - 1):
        return None
    return int(x.value).bit_length() - 1


def both(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """op(a, b), where an absent side gives the other one."""
    return b if a is None else a if b is None else apply(op, a, b)
