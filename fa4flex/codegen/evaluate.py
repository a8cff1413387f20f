"""The meaning of every operation, on torch tensors: expressions evaluated over broadcast index tensors.

Integers are int64: exact up to 2^63, and whoever evaluates has proved that they stay below it
(`analyze.overflow`). Floats are computed at `dtype`: float32 for
half-precision inputs and float32, float64 for float64. Broadcasting does the hoisting: a term that
depends on the query alone is computed on a (rows, 1) tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.expr import Expr, loops, slot_of, walk
from fa4flex.codegen.keep import keep
from fa4flex.codegen.ops import DIVISIONS, FOLDS, OPS
from fa4flex.errors import InputError, UnsupportedError

Number = bool | int | float
Value = Tensor | Number
Index = tuple[Any, ...]


@dataclass(frozen=True)
class Captured:
    """Inputs of a program besides indices: tensors by slot, and run-time numbers by slot.

    Tensors on the "meta" device stand for contents that are not read. Their integers are taken to be of a
    size below MODEST, or below 2^bits for the slots in `bits`. Where reads are `clamped`, those outside of a
    tensor are of its nearest element, as in kernels, and no content is looked at.
    """

    operands: tuple[Tensor, ...] = ()
    scalars: tuple[Number, ...] = ()
    bits: tuple[tuple[int, int], ...] = ()
    clamped: bool = False

    def signed(self) -> Captured:
        """The same contents without uint16, uint32 and uint64, for which torch has few operations.

        Raises UnsupportedError where an element does not fit in int64.
        """
        if not any(x.dtype in UNSIGNED for x in self.operands):
            return self
        return replace(self, operands=tuple(map(_signed, self.operands)))

    def clamped_reads(self) -> Captured:
        """The same contents, on a device that the host does not wait for."""
        narrow = tuple([x.to(torch.int64) if x.dtype in UNSIGNED else x for x in self.operands])
        return replace(self, operands=narrow, clamped=True)

    def unread(self) -> Captured:
        """The same tensors without contents."""
        return replace(self, operands=tuple(x.to("meta") for x in self.operands))

    def largest(self, slot: int) -> int:
        """Bound that the size of integers of a tensor is taken to be below, where they are not read."""
        return 1 << dict(self.bits).get(slot, MODEST_BITS)


MODEST_BITS = 30
MODEST = 1 << MODEST_BITS
"""Sums and differences of two integers below it fit in 32 bits."""

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _signed(x: Tensor) -> Tensor:
    if x.dtype not in UNSIGNED:
        return x
    if x.dtype == torch.uint64 and not x.is_meta and bool((x.view(torch.int64) < 0).any()):
        raise UnsupportedError(
            "a captured uint64 tensor with elements beyond 2^63 - 1",
            "integers that fit in int64",
            "clamp or rescale it before the call, and store it as int64",
        )
    return x.to(torch.int64)


class PastTheEnd(InputError, IndexError):
    """A mod read outside a captured tensor. Also an IndexError, as it is when the mod runs under torch.

    `node` is the load or search, `slot` that of the tensor.
    """

    def __init__(self, table: Tensor, index: str, node: Expr | None = None) -> None:
        self.node = node
        super().__init__(
            f"a mod read past a captured tensor of shape {list(table.shape)}: {index}",
            "indices within the tensor: in a mask for every pair, in a score mod for every allowed pair",
            "make the tensor larger, or clamp the index in the mod",
        )

    @property
    def slot(self) -> int | None:
        return None if self.node is None else slot_of(self.node)


class DividedByZero(InputError, ZeroDivisionError):
    """An integer division or remainder by 0: `node`."""

    def __init__(self, node: Expr) -> None:
        self.node = node
        super().__init__(
            f"`{node}` divides an integer by 0",
            "divisors other than 0: in a mask for every pair, in a score mod for every allowed pair",
            "clamp the divisor (x.clamp(min=1)), as a division in the other branch of a where runs too, "
            "or divide floats",
        )


def _tensor(x: Value, dtype: torch.dtype) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype)


def _torch_float(name: str) -> Callable[..., Value]:
    function = getattr(torch, name)
    return lambda dtype, *xs: function(*(_tensor(x, dtype) for x in xs))


def _torch_int(name: str) -> Callable[..., Value]:
    """For operations on ints and floats alike that torch does not take Python numbers for."""
    function = getattr(torch, name)

    def call(dtype: torch.dtype, *xs: Value) -> Value:
        kind = dtype if any(isinstance(x, float) for x in xs) else torch.int64
        like = next((x for x in xs if isinstance(x, Tensor)), None)
        return function(*(_tensor(x, kind if like is None else like.dtype) for x in xs))

    return call


def _plain(function: Callable[..., Any]) -> Callable[..., Value]:
    return lambda dtype, *xs: function(*xs)


def _where(dtype: torch.dtype, c: Value, a: Value, b: Value) -> Value:
    if not isinstance(c, Tensor):
        return a if c else b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        kind = dtype if isinstance(a, float) or isinstance(b, float) else torch.int64
        a = torch.tensor(a, dtype=kind)
    return torch.where(c, a, b)


def _truncdiv(dtype: torch.dtype, a: Value, b: Value) -> Value:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = torch.tensor(a)
    return torch.div(a, b, rounding_mode="trunc")


def _shift(name: str) -> Callable[..., Value]:
    """A negative shift loses all bits, as too wide a one does: for Python's numbers too, as for tensors."""
    function = getattr(operator, name)

    def call(dtype: torch.dtype, a: Value, s: Value) -> Value:
        if not isinstance(s, Tensor) and s < 0:
            a, s = (0 * a, 0) if name == "lshift" else (a, 63)
        shifted: Value = function(a, s)
        return shifted

    return call


def _divide(dtype: torch.dtype, a: Value, b: Value) -> Value:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a / b
    return _tensor(a, torch.float64) / _tensor(b, torch.float64)  # inf and nan as torch gives them


_OWN: dict[str, Callable[..., Value]] = {
    **{
        name: _plain(getattr(operator, name))
        for name in ("add", "sub", "mul", "neg", "abs", "lt", "le", "eq", "ne", "floordiv", "mod")
    },
    **{name: _torch_int(name) for name in ("minimum", "maximum", "sign")},
    "truncdiv": _truncdiv,
    "div": _divide,
    **dict.fromkeys(("bitand", "and_"), _plain(operator.and_)),
    **dict.fromkeys(("bitor", "or_"), _plain(operator.or_)),
    **dict.fromkeys(("bitxor", "xor"), _plain(operator.xor)),
    "bitnot": _plain(operator.invert),
    "shl": _shift("lshift"),
    "shr": _shift("rshift"),
    "not_": _plain(lambda x: ~x if isinstance(x, Tensor) else not x),
    "where": _where,
    "to_float": lambda dtype, x: x.to(dtype) if isinstance(x, Tensor) else float(x),
    "to_int": _plain(lambda x: x.to(torch.int64) if isinstance(x, Tensor) else int(x)),
    "to_bool": _plain(lambda x: x != 0),
    "detach": _plain(lambda x: x),
    "with_grad": _plain(lambda value, x, slope: value),
}
"""Operations that are no function of floats."""


@cache
def operation(op: str) -> Callable[..., Value]:
    """Evaluator of `op`: called with the precision of the computation and the arguments' values."""
    return _OWN.get(op) or _torch_float(OPS[op].torch[0])


@lru_cache(maxsize=512)
def _schedule(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Nodes in evaluation order, without those that only exist inside a reduction's loop."""
    axes = loops(*roots).keys()
    outside = {axis for root in roots for axis in root.free & axes}
    return tuple(node for node in walk(*roots) if not node.free & (axes - outside))


def evaluate(
    roots: Sequence[Expr],
    symbols: Mapping[str, Value],
    captured: Captured = Captured(),
    dtype: torch.dtype = torch.float32,
    known: Mapping[Expr, Value] | None = None,
) -> list[Value]:
    """Values of `roots` where each symbol is a number or a tensor broadcastable with the others.

    Index symbols are int64 tensors or ints, "score" is a tensor of `dtype`. Results broadcast: a root that
    depends on `kv` alone comes back with the shape of `kv`, a constant as a Python number.
    `known` are values of some nodes.
    """
    memo: dict[Expr, Value] = {} if known is None else dict(known)
    for node in _schedule(tuple(roots)):
        if node not in memo:
            memo[node] = _value(node, memo, symbols, captured, dtype)
    return [memo[root] for root in roots]


def _value(
    node: Expr, memo: dict[Expr, Value], symbols: Mapping[str, Value], captured: Captured, dtype: torch.dtype
) -> Value:
    match node.op:
        case "sym":
            return symbols[node.value]
        case "const":
            return node.value
        case "scalar":
            return captured.scalars[node.value]
        case "load":
            table, index = captured.operands[node.value], [memo[a] for a in node.args]
            if captured.clamped:
                return _load(table, _clamped(table, index), node, dtype, clamped=True)
            return _load(table, index, node, dtype)
        case "search":
            table, (needle, *lead) = captured.operands[node.value[0]], [memo[a] for a in node.args]
            if captured.clamped:
                return _search(table, [needle, *_clamped(table, lead)], node, clamped=True)
            return _search(table, [needle, *lead], node)
        case "round_to":
            narrow = getattr(torch, node.value)
            return _tensor(memo[node.args[0]], dtype).to(narrow).to(dtype)
        case "keep":
            return keep(*(_tensor(memo[a], torch.int64) for a in node.args))
        case "reduce":
            return _reduce(node, memo, symbols, captured, dtype)
        case _:
            if node.op in DIVISIONS and node.kind == "int" and not captured.clamped:
                _refuse_zero(node, memo[node.args[1]])
            return operation(node.op)(dtype, *(memo[a] for a in node.args))


def _refuse_zero(node: Expr, divisor: Value) -> None:
    if bool((divisor == 0).any()) if isinstance(divisor, Tensor) else divisor == 0:
        raise DividedByZero(node)


def _clamped(table: Tensor, index: Sequence[Value]) -> list[Value]:
    """Indices within the tensor; negative ones still count from its end."""
    ends = list(zip(index, table.shape, strict=False))
    return [
        i.clamp(-size, size - 1) if isinstance(i, Tensor) else max(-size, min(int(i), size - 1))
        for i, size in ends
    ]


def _read(table: Tensor, index: Sequence[Value], node: Expr, clamped: bool = False) -> Tensor:
    position: Index = tuple(index)
    if clamped:
        return table[position] if position else table
    if table.is_cuda:
        _refuse_past_the_end(table, position, node)
    elif (place := _place(table, position)) is not None:
        return table.view(-1).index_select(0, place.flatten()).view(place.shape)
    try:
        return table[position] if position else table
    except IndexError as error:
        raise PastTheEnd(table, str(error), node) from None


def _place(table: Tensor, position: Index) -> Tensor | None:
    """Memory offset of each of many elements: looked up by one number, they take a quarter of the time. None
    where that does not apply, or an index lies outside [0, size)."""
    if len(position) != table.ndim or not table.is_contiguous():
        return None
    if math.prod([x.numel() for x in position if isinstance(x, Tensor)]) < FEWEST_PLACES:
        return None
    place: Value = 0
    for x, size, step in zip(position, table.shape, table.stride(), strict=True):
        if isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype != torch.int64):
            return None
        lo, hi = (int(end) for end in x.aminmax()) if isinstance(x, Tensor) else (x, x)
        if lo < 0 or hi >= size:
            return None
        place = place + x * step
    return place if isinstance(place, Tensor) else None


FEWEST_PLACES = 2048
"""An estimate from above: indices that depend on one symbol each are as many as their product."""


def _refuse_past_the_end(table: Tensor, position: Index, node: Expr) -> None:
    """On a GPU a read past the end would not raise: it would end the process's use of the device."""
    for i, size in zip(position, table.shape, strict=False):
        if isinstance(i, Tensor) and i.numel() and bool(((i < -size) | (i >= size)).any()):
            raise PastTheEnd(table, f"an index outside [-{size}, {size})", node)


def _load(
    table: Tensor, index: Sequence[Value], node: Expr, dtype: torch.dtype, clamped: bool = False
) -> Value:
    element = _read(table, index, node, clamped)
    return element.to({"float": dtype, "int": torch.int64, "bool": torch.bool}[node.kind])


def _search(table: Tensor, args: Sequence[Value], node: Expr, clamped: bool = False) -> Tensor:
    needle, *lead = args
    side: str = node.value[1]
    vector = _read(table, lead, node, clamped)
    needle = torch.as_tensor(needle)
    common = torch.promote_types(vector.dtype, needle.dtype)  # searchsorted wants one dtype
    vector, needle = vector.to(common), needle.to(common)
    if vector.ndim == 1:
        return torch.searchsorted(vector.contiguous(), needle.contiguous(), side=side)
    # One vector per element of the leading indices: compare and count, O(vector) per needle.
    below = vector < needle.unsqueeze(-1) if side == "left" else vector <= needle.unsqueeze(-1)
    return below.sum(-1)


def _reduce(
    node: Expr, memo: dict[Expr, Value], symbols: Mapping[str, Value], captured: Captured, dtype: torch.dtype
) -> Value:
    """Fold in a loop over the axis: memory stays that of one element, and the order is fixed.

    A sum of row terms times column terms is a matrix product, and computed as one.
    """
    how, axis, extent = node.value
    if how == "sum" and (product := _product(node, memo, symbols, captured, dtype)) is not None:
        return product
    inside, fold = _varying(node.args[0], axis), operation(FOLDS[how])
    total: Value | None = None
    for i in range(extent):
        inner, bound = dict(memo), {**symbols, axis: i}
        for n in inside:
            inner[n] = _value(n, inner, bound, captured, dtype)
        term = inner[node.args[0]]
        total = term if total is None else fold(torch.float64, total, term)
    assert total is not None, "empty reductions are folded when the expression is built"
    return total


@lru_cache(maxsize=512)
def _varying(body: Expr, axis: str) -> tuple[Expr, ...]:
    """Nodes under `body` that change with `axis`, arguments first; those that need an inner axis are not."""
    results: dict[Expr, None] = {}
    seen: set[tuple[Expr, frozenset[str]]] = set()

    def visit(node: Expr, bound: frozenset[str]) -> None:
        if axis not in node.free or (node, bound) in seen:
            return
        seen.add((node, bound))
        for arg in node.args:
            visit(arg, bound | {node.value[1]} if node.op == "reduce" else bound)
        if not node.free & bound:
            results.setdefault(node)

    visit(body, frozenset())
    return tuple(results)


def _product(
    node: Expr, memo: dict[Expr, Value], symbols: Mapping[str, Value], captured: Captured, dtype: torch.dtype
) -> Tensor | None:
    """sum over the axis of a[.., R, 1] * b[.., 1, C] as a[.., R, axis] @ b[.., axis, C]; else None."""
    _, axis, extent = node.value
    body = node.args[0]
    if body.op != "mul" or body.kind != "float" or any(n.op == "reduce" for n in walk(body)):
        return None
    rank = max((x.ndim for x in symbols.values() if isinstance(x, Tensor)), default=0)
    along = torch.arange(extent).view(extent, *[1] * rank)
    inner, bound = dict(memo), {**symbols, axis: along}
    for n in walk(body):
        if axis in n.free and n is not body:
            inner[n] = _value(n, inner, bound, captured, dtype)
    terms = [inner[arg] for arg in body.args]
    if rank < 2 or not all(isinstance(t, Tensor) and t.ndim == rank + 1 for t in terms):
        return None
    rows, columns = terms if terms[0].shape[-1] == 1 else terms[::-1]  # type: ignore[union-attr]
    if rows.shape[-1] != 1 or columns.shape[-2] != 1:  # type: ignore[union-attr]
        return None
    return rows.squeeze(-1).movedim(0, -1) @ columns.squeeze(-2).movedim(0, -2)  # type: ignore[union-attr]
