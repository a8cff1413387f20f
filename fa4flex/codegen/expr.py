"""The expression grammar: what a traced score_mod or mask_mod means.

    Expr = Sym(name)                     score, an index (b h q kv), a length, or a reduction axis
         | Const(value)                  a Python bool, int or float
         | Scalar(slot)                  a run-time number the user's function captured
         | Load(slot, index...)          one element of a captured tensor
         | Search(slot, side, needle, lead...)   where `needle` falls in a sorted captured vector
         | Reduce(how, axis, extent, x)  x folded over a small static axis
         | <elementwise>(x...)           add, lt, where, tanh, ... : the rows of ops.py
         | RoundTo(dtype, x)             x rounded to a named float precision
         | Keep(seed, threshold, b, h, q, kv)    whether dropout keeps a pair: primitives/dropout.py

Every node has a kind: "bool", "int" (a mathematical integer) or "float" (a number at the
computation's precision). Nodes are interned: equal expressions are the same object, so a
dictionary keyed by node is a memo table and shared work is shared in the graph.

`str` prints infix for people; `repr` prints constructor calls that evaluate back to the same node.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

from fa4flex.codegen.ops import FOLDS, INFIX, OPS, PREFIX, Operation

Kind = Literal["bool", "int", "float"]

INDICES = ("b", "h", "q", "kv")
CONTEXT = ("q_len", "kv_len", "num_heads")
"""Further arguments of a mod, by parameter name: lengths of the sequence, number of query heads."""
SYMBOLS = ("score", *INDICES, *CONTEXT)

READS = ("load", "search")
"""Operations that read captured tensors."""


class Expr:
    """One node: `op`, its argument nodes, and a payload (`value`) for leaves, loads and reductions."""

    __slots__ = ("__weakref__", "args", "free", "kind", "op", "value")

    op: str
    args: tuple[Expr, ...]
    value: Any
    kind: Kind
    free: frozenset[str]
    """Names of the symbols this value depends on (reduction axes bound inside are not free)."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Expr is frozen: cannot set {name!r}")

    def __repr__(self) -> str:
        return _print_constructor(self)

    def __str__(self) -> str:
        return _print_infix(self)

    def __reduce__(self) -> tuple[Callable[..., Expr], tuple[object, ...]]:
        return _node, (self.op, self.args, self.value, self.kind)

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Expr:
        return self


_interned: weakref.WeakValueDictionary[Hashable, Expr] = weakref.WeakValueDictionary()


def _node(op: str, args: tuple[Expr, ...], value: Any, kind: Kind) -> Expr:
    # type(value) keeps True apart from 1 and 1 from 1.0; repr keeps -0.0 apart from 0.0, and NaN findable.
    identity = repr(value) if isinstance(value, float) else value
    key = (op, tuple(map(id, args)), type(value), identity, kind)
    result = _interned.get(key)
    if result is not None:
        return result
    node = object.__new__(Expr)
    free: frozenset[str] = frozenset().union(*(a.free for a in args))
    if op == "sym":
        free = frozenset((value,))
    elif op == "reduce":
        free -= {value[1]}
    for name, field in (("op", op), ("args", args), ("value", value), ("kind", kind), ("free", free)):
        object.__setattr__(node, name, field)
    return _interned.setdefault(key, node)


# --- leaves ---------------------------------------------------------------------------------------


def sym(name: str) -> Expr:
    """A symbol: one of SYMBOLS, or a reduction axis (any other name)."""
    return _node("sym", (), name, "float" if name == "score" else "int")


def const(value: bool | int | float) -> Expr:
    kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return _node("const", (), value, kind)


def scalar(slot: int, kind: Kind) -> Expr:
    """Run-time number `slot` of the trace: its value may change without changing the program."""
    return _node("scalar", (), slot, kind)


TRUE, FALSE = const(True), const(False)


# --- compound nodes -------------------------------------------------------------------------------


def load(slot: int, index: Iterable[Expr], kind: Kind) -> Expr:
    """`operand[slot][index...]`; a negative index counts from the end, as in torch."""
    index = tuple(index)
    if any(i.kind != "int" for i in index):
        raise TypeError(f"an index is an int; got {[i.kind for i in index]}")
    return _node("load", index, slot, kind)


def search(slot: int, side: Literal["left", "right"], needle: Expr, lead: Iterable[Expr] = ()) -> Expr:
    """Number of elements of sorted `operand[slot][lead...]` that are < needle ("left") or <= needle
    ("right")."""
    return _node("search", (needle, *lead), (slot, side), "int")


def reduce(how: str, axis: str, extent: int, body: Expr) -> Expr:
    """`body` folded with `how` (one of FOLDS) over `axis` = 0 .. extent-1."""
    if how not in FOLDS:
        raise ValueError(f"unknown reduction {how!r}; one of {(*FOLDS,)}")
    if how in ("any", "all"):
        body = to_bool(body)
        if axis not in body.free:
            return body if extent else const(how == "all")
    if extent == 0 and how in ("sum", "prod"):
        return const({"int": int, "bool": int, "float": float}[body.kind](how == "prod"))
    if axis not in body.free and how in ("max", "min"):
        return body
    if body.kind == "bool" and how in ("sum", "prod"):
        body = to_int(body)
    return _node("reduce", (body,), (how, axis, extent), body.kind)


def round_to(dtype: str, x: Expr) -> Expr:
    """x rounded to `dtype` ("float16", "bfloat16", "float32") and back to the computation's precision."""
    return _node("round_to", (to_float(x),), dtype, "float")


def keep(seed: Expr, threshold: Expr, pair: tuple[Expr, Expr, Expr, Expr] | None = None) -> Expr:
    """True for pairs (b, h, q, kv) that dropout keeps; absent: those of the symbols."""
    at = tuple(map(sym, INDICES)) if pair is None else pair
    if any(x.kind != "int" for x in (seed, threshold, *at)) or len(at) != 4:
        raise TypeError("dropout has a seed, a threshold and four indices, which are ints")
    return _node("keep", (seed, threshold, *at), None, "bool")


def to_float(x: Expr) -> Expr:
    if x.kind == "float":
        return x
    if x.op == "const" and abs(x.value) <= sys.float_info.max:
        return const(float(x.value))
    return _node("to_float", (x,), None, "float")


def to_int(x: Expr) -> Expr:
    if x.kind == "int":
        return x
    if x.op == "const" and math.isfinite(x.value):
        return const(int(x.value))
    return _node("to_int", (x,), None, "int")


def to_bool(x: Expr) -> Expr:
    if x.kind == "bool":
        return x
    return const(bool(x.value)) if x.op == "const" else _node("to_bool", (x,), None, "bool")


def folded(op: str, values: Sequence[Expr]) -> Expr:
    """The values joined by a binary operation, from left to right."""
    result, *others = values
    for value in others:
        result = apply(op, result, value)
    return result


def make(op: str, args: tuple[Expr, ...], value: Any, kind: Kind) -> Expr:
    """The node of an operation of any sort, simplified."""
    match op:
        case "sym":
            return sym(value)
        case "const":
            return const(value)
        case "scalar":
            return scalar(value, kind)
        case "load":
            return load(value, args, kind)
        case "search":
            slot, side = value
            return search(slot, side, args[0], args[1:])
        case "reduce":
            how, axis, extent = value
            return reduce(how, axis, extent, args[0])
        case "round_to":
            return round_to(value, args[0])
        case "keep":
            return keep(args[0], args[1], args[2:])  # type: ignore[arg-type]
    return apply(op, *args)


def _promote(args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Arguments at their common kind: any float makes all float; bool counts as int in arithmetic."""
    if any(a.kind == "float" for a in args):
        return tuple(map(to_float, args))
    if any(a.kind == "int" for a in args):
        return tuple(map(to_int, args))
    return args


def _numbers(args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """`_promote`, but two bools are ints as well."""
    args = _promote(args)
    return tuple(map(to_int, args)) if args[0].kind == "bool" else args


_CONVERTED: dict[str, Callable[[tuple[Expr, ...]], tuple[Expr, ...]]] = {
    "bool": lambda args: tuple(map(to_bool, args)),
    "int": lambda args: tuple(map(to_int, args)),
    "float": lambda args: tuple(map(to_float, args)),
    "any": _promote,
    "number": _numbers,
}
_CONVERSIONS = {"to_float": to_float, "to_int": to_int, "to_bool": to_bool}
_SWAPPED = {"gt": "lt", "ge": "le"}


def apply(op: str, *args: Expr) -> Expr:
    """The elementwise node `op(*args)`, with kinds promoted as torch does and constants folded.

    `gt` and `ge` become `lt` and `le` with the arguments swapped, so analyses see half the cases.
    """
    if op in _SWAPPED:
        op, args = _SWAPPED[op], args[::-1]
    row = OPS.get(op)
    if row is None:
        raise ValueError(f"unknown operation {op!r}")
    if len(args) != row.arity:
        raise TypeError(f"{op} takes {row.arity} arguments; got {len(args)}")
    if op in _CONVERSIONS:
        return _CONVERSIONS[op](args[0])
    if op == "where":
        args = (to_bool(args[0]), *_promote(args[1:]))
    else:
        args = _CONVERTED[row.takes](args)
    simple = _simplify(row, args)
    if simple is not None:
        return simple
    return _node(op, args, None, args[-1].kind if row.gives == "same" else row.gives)


# --- simplification: exact rewrites only ------------------------------------------------------------


def _simplify(row: Operation, args: tuple[Expr, ...]) -> Expr | None:
    if row.fold is not None and all(a.op == "const" for a in args):
        try:
            value = row.fold(*(a.value for a in args))
        except (ArithmeticError, ValueError):
            return None  # 1/0 or log(-1): left to the run time, where torch says inf or nan
        return None if isinstance(value, complex) else const(value)
    rule = _RULES.get(row.name)
    return rule(*args) if rule else None


def _is(x: Expr, value: bool | int | float) -> bool:
    return x.op == "const" and x.value == value and (x.kind == "bool") == isinstance(value, bool)


def _and(a: Expr, b: Expr) -> Expr | None:
    if a is FALSE or b is FALSE:
        return FALSE
    return b if a is TRUE else a if b is TRUE or a is b else None


def _or(a: Expr, b: Expr) -> Expr | None:
    if a is TRUE or b is TRUE:
        return TRUE
    return b if a is FALSE else a if b is FALSE or a is b else None


def _not(a: Expr) -> Expr | None:
    if a.op == "not_":
        return a.args[0]
    if a.op in ("lt", "le") and a.args[0].kind == "int":  # not so for floats: NaN compares false both ways
        return apply("le" if a.op == "lt" else "lt", a.args[1], a.args[0])
    return apply("ne" if a.op == "eq" else "eq", *a.args) if a.op in ("eq", "ne") else None


def _not_of(a: Expr) -> Expr:
    return apply("not_", a)


def _add(a: Expr, b: Expr) -> Expr | None:
    # x + 0.0 is kept for floats only when x could be -0.0; scores do not care, and neither does torch.
    return b if _is(a, 0) else a if _is(b, 0) else None


def _mul(a: Expr, b: Expr) -> Expr | None:
    if a.kind == "int" and (_is(a, 0) or _is(b, 0)):
        return const(0)
    return b if _is(a, 1) else a if _is(b, 1) else None


def _where(c: Expr, a: Expr, b: Expr) -> Expr | None:
    if c.op == "const":
        return a if c.value else b
    if a is b:
        return a
    if a.kind == "bool":
        return apply("or_", apply("and_", c, a), apply("and_", apply("not_", c), b))
    return None


def _same_int(result: bool) -> Callable[[Expr, Expr], Expr | None]:
    return lambda a, b: const(result) if a is b and a.kind != "float" else None


_RULES: dict[str, Callable[..., Expr | None]] = {
    "and_": _and, "or_": _or, "not_": _not, "add": _add, "mul": _mul, "where": _where,
    "sub": lambda a, b: a if _is(b, 0) else const(0) if a is b and a.kind == "int" else None,
    "div": lambda a, b: a if _is(b, 1) else None,
    "floordiv": lambda a, b: a if _is(b, 1) and a.kind == "int" else None,
    "mod": lambda a, b: const(0) if _is(b, 1) and a.kind == "int" else None,
    "neg": lambda a: a.args[0] if a.op == "neg" else None,
    "minimum": lambda a, b: a if a is b else None, "maximum": lambda a, b: a if a is b else None,
    "xor": lambda a, b: _not_of(a) if b is TRUE else a if b is FALSE else _not_of(b) if a is TRUE else None,
    "eq": _same_int(True), "le": _same_int(True), "lt": _same_int(False), "ne": _same_int(False),
    "detach": lambda a: a if a.op in ("const", "detach") else None,
}  # fmt: skip


# --- the graph ------------------------------------------------------------------------------------


def walk(*roots: Expr, into: Callable[[Expr], Sequence[Expr]] = attrgetter("args")) -> Iterator[Expr]:
    """Every node under `roots` once, those that `into` says it needs (its arguments) before it."""
    seen: set[Expr] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(into(node)))


def brief(node: Expr, most: int = 120) -> str:
    """`node` as text; where that has more than `most` operators and names, as the number of its operations.

    Text repeats what a node uses twice, so that it may be exponentially longer than the expression.
    """
    sizes: dict[Expr, int] = {}
    for inner in walk(node):
        sizes[inner] = 1 + sum(sizes[arg] for arg in inner.args)
    if sizes[node] <= most:
        return str(node)
    return f"an expression of {sum(1 for inner in sizes if inner.args)} operations"


@lru_cache(maxsize=4096)
def nodes(*roots: Expr) -> tuple[Expr, ...]:
    """`walk`, for expressions that are asked about again and again."""
    return tuple(walk(*roots))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with other arguments, simplified anew."""
    return node if args == node.args else make(node.op, args, node.value, node.kind)


def rewritten(
    root: Expr,
    change: Callable[[Expr, tuple[Expr, ...]], Expr],
    memo: dict[Expr, Expr] | None = None,
) -> Expr:
    """`root` with `change(node, its new arguments)` for each node; `memo` has what became of which."""
    memo = {} if memo is None else memo
    for node in walk(root):
        if node not in memo:
            memo[node] = change(node, tuple([memo[arg] for arg in node.args]))
    return memo[root]


def substitute(root: Expr, replacement: dict[Expr, Expr]) -> Expr:
    """`root` with each node in `replacement` replaced; replacements are not searched again. In the body of a
    reduction its axis is another symbol than the one of that name outside."""
    memo: dict[Expr, Expr] = {}
    for node in walk(root):
        known = replacement.get(node)
        axis = sym(node.value[1]) if node.op == "reduce" else None
        if known is not None:
            memo[node] = known
        elif axis in replacement:
            outside = {x: y for x, y in replacement.items() if x is not axis}
            memo[node] = rebuild(node, tuple(substitute(a, outside) for a in node.args))
        else:
            memo[node] = rebuild(node, tuple(memo[a] for a in node.args))
    return memo[root]


def slot_of(read: Expr) -> int:
    """The slot that a load or a search reads."""
    slot: int = read.value if read.op == "load" else read.value[0]
    return slot


def index_of(read: Expr) -> tuple[Expr, ...]:
    """The index of the element that a load reads, or of the vector that a search looks through."""
    return read.args if read.op == "load" else read.args[1:]


def loops(*roots: Expr) -> dict[str, int]:
    """Extents of the axes that reductions under `roots` run over."""
    return {node.value[1]: node.value[2] for node in nodes(*roots) if node.op == "reduce"}


def loads(*roots: Expr) -> list[Expr]:
    """Every `load` node under `roots`, in order of first use."""
    return [node for node in nodes(*roots) if node.op == "load"]


# --- printing -------------------------------------------------------------------------------------


def _print_infix(root: Expr) -> str:
    text: dict[Expr, str] = {}

    def inner(x: Expr) -> str:
        return f"({text[x]})" if x.op in INFIX else text[x]

    for node in walk(root):
        if node.op in ("sym", "const"):
            text[node] = str(node.value)
        elif node.op == "scalar":
            text[node] = f"s{node.value}"
        elif node.op == "load":
            text[node] = f"t{node.value}[{', '.join(text[a] for a in node.args)}]"
        elif node.op == "search":
            lead = f"[{', '.join(text[a] for a in node.args[1:])}]" if node.args[1:] else ""
            text[node] = f"search_{node.value[1]}(t{node.value[0]}{lead}, {text[node.args[0]]})"
        elif node.op == "reduce":
            how, axis, extent = node.value
            text[node] = f"{how}({text[node.args[0]]} for {axis} in range({extent}))"
        elif node.op == "round_to":
            text[node] = f"{node.value}({text[node.args[0]]})"
        elif node.op == "to_float":
            text[node] = text[node.args[0]] if node.args[0].op not in INFIX else f"({text[node.args[0]]})"
        elif node.op in INFIX:
            text[node] = f"{inner(node.args[0])} {INFIX[node.op]} {inner(node.args[1])}"
        elif node.op in PREFIX:
            text[node] = f"{PREFIX[node.op]}{inner(node.args[0])}"
        else:
            text[node] = f"{node.op}({', '.join(text[a] for a in node.args)})"
    return text[root]


def _print_constructor(root: Expr) -> str:
    text: dict[Expr, str] = {}
    for node in walk(root):
        args = ", ".join(text[a] for a in node.args)
        if node.op == "sym":
            text[node] = f"sym({node.value!r})"
        elif node.op == "const":
            finite = not isinstance(node.value, float) or math.isfinite(node.value)
            text[node] = f"const({node.value!r})" if finite else f"const(float('{node.value}'))"
        elif node.op == "scalar":
            text[node] = f"scalar({node.value}, {node.kind!r})"
        elif node.op == "load":
            text[node] = f"load({node.value}, ({args}{',' if len(node.args) == 1 else ''}), {node.kind!r})"
        elif node.op == "search":
            lead = "".join(text[a] + ", " for a in node.args[1:])
            text[node] = f"search({node.value[0]}, {node.value[1]!r}, {text[node.args[0]]}, ({lead}))"
        elif node.op == "reduce":
            text[node] = "reduce({!r}, {!r}, {}, {})".format(*node.value, args)
        elif node.op == "round_to":
            text[node] = f"round_to({node.value!r}, {args})"
        elif node.op == "keep":
            seed, threshold, *pair = (text[a] for a in node.args)
            text[node] = f"keep({seed}, {threshold}, ({', '.join(pair)}))"
        else:
            text[node] = f"apply({node.op!r}, {args})"
    return text[root]
