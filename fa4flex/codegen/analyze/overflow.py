"""Integer overflow: exact ranges of every integer node over the whole problem.

Expressions mean mathematical integers; the CPU computes them in int64, device code in 32 bits where they fit
and in 64 where they do not. Nothing wraps: what could leave 64 bits is decided beforehand where possible
(`kv <= q + sys.maxsize` holds for every pair), and refused where not.

Most programs are proved once for all modest problems. A call then compares its captured numbers, and the
contents of those int64 tensors that arithmetic depends on, with what that proof assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fa4flex import contents
from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import Shape, numbers_read, on_host, slots_read
from fa4flex.codegen.analyze.rules import VAGUE, Bounds, any_float, of_captured, of_dtype
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.evaluate import Captured, DividedByZero
from fa4flex.codegen.expr import (
    CONTEXT,
    INDICES,
    READS,
    Expr,
    const,
    loops,
    nodes,
    rebuild,
    to_float,
)
from fa4flex.codegen.ops import COMPARISONS, DIVISIONS
from fa4flex.errors import UnsupportedError
from fa4flex.exact import exactly

_SAFE = 1 << 61
"""Beyond this, the difference of two int64 numbers might not be one."""

_WORD = 1 << 63
MODEST_COUNT, MODEST_LENGTH, MODEST_NUMBER = 1 << 20, 1 << 30, 1 << 32
"""Batch entries and heads, sequence lengths, and captured numbers that an ordinary call stays below."""

Dtypes = tuple[torch.dtype, ...]


class TooLarge(UnsupportedError):
    """An integer that might not fit in 64 bits. `node` computes it."""

    def __init__(self, node: Expr, ends: tuple[int, int], shape: Shape) -> None:
        self.node = node
        low, high = map(_written, ends)
        value = f"`{node}` is {low}" if low == high else f"`{node}` lies between {low} and {high}"
        value = f"the constant {low}" if node.op == "const" else value
        super().__init__(
            f"{value} at q_len={shape.q_len}, kv_len={shape.kv_len}",
            "integer arithmetic that fits in 64-bit integers",
            "keep the numbers smaller: clamp them, compare before adding or multiplying, or compute in "
            "floats with .float()",
        )


def _written(x: int) -> str:
    """Digits tell little of a very large number, and Python refuses to write some."""
    return str(x) if abs(x) < VAGUE else f"about {'-' if x < 0 else ''}2^{x.bit_length() - 1}"


# --- exact ranges -----------------------------------------------------------------------------------------


def index_ranges(roots: Sequence[Expr], shape: Shape, captured: Captured) -> dict[Expr, tuple[int, int]]:
    """Bounds, as exact Python ints, of every integer node under `roots` over all b, h, q, kv of `shape`."""
    wanted = integers(*roots)
    result = _ranges(roots, wanted, shape.ranges(), Tables(on_host(captured, *wanted)))
    return {node: (int(result[node].lo), int(result[node].hi)) for node in wanted}


@lru_cache(maxsize=1024)
def integers(*roots: Expr) -> tuple[Expr, ...]:
    """Every integer node under `roots`: what these are computed from decides indices."""
    return tuple(node for node in nodes(*roots) if node.kind == "int")


@lru_cache(maxsize=1024)
def computed_with(*roots: Expr) -> tuple[int, ...]:
    """Slots of captured tensors whose integers are computed with, or index others: comparisons take any."""
    users = [node for node in nodes(*roots) if node.kind == "int" or node.op in READS]
    return tuple(sorted(slots_read(*(x for node in users for x in node.args if x.kind == "int"))))


def overflowing(
    roots: Sequence[Expr], shape: Shape, captured: Captured, bits: int = 32
) -> list[tuple[Expr, tuple[int, int]]]:
    """Integer nodes that may not fit in a signed integer of `bits`, with their ranges, arguments first."""
    limit = 1 << (bits - 1)
    ranges = index_ranges(roots, shape, captured)
    return [(node, ends) for node, ends in ranges.items() if ends[0] < -limit or ends[1] >= limit]


def beyond_int64(root: Expr, shape: Shape, tables: Tables) -> Mapping[Expr, Bounds]:
    """Ranges over the whole problem of nodes that int64 interval arithmetic cannot be trusted with.

    These are the nodes that may be too large, and all that is computed from them.
    """
    result = _ranges([root], [root], shape.ranges(), tables)
    tainted: dict[Expr, Bounds] = {}
    for node in nodes(root):
        x = result.get(node)
        too_large = node.kind == "int" and x is not None and (x.lo < -_SAFE or x.hi > _SAFE)
        if x is not None and (too_large or any(a in tainted for a in node.args)):
            tainted[node] = x
    return tainted


def _ranges(
    roots: Sequence[Expr],
    wanted: Sequence[Expr],
    symbols: Mapping[str, Bounds],
    tables: Tables,
    known: Mapping[Expr, Bounds] | None = None,
) -> dict[Expr, Bounds]:
    """Bounds of every node under those `wanted`, which are under `roots`, and perhaps in their loops."""
    every = nodes(*wanted)
    symbols = {**symbols, "score": any_float()}
    axes = {axis: Bounds(0, extent - 1) for axis, extent in loops(*roots).items()}
    # A loop bounds its body step by step. What is inside is bounded apart, over all steps at once.
    outside = [node for node in every if not node.free & axes.keys()]
    inside = [node for node in every if node.free & axes.keys()]
    result = dict(zip(outside, bounds(outside, symbols, tables, known)))
    return result | dict(zip(inside, bounds(inside, {**symbols, **axes}, tables, known)))


# --- what is proved once for all modest problems ----------------------------------------------------------


@dataclass(frozen=True)
class _Assumed:
    """Captured numbers and int64 tensors, by slot, whose contents must stay below MODEST_NUMBER."""

    numbers: tuple[int, ...]
    tensors: tuple[int, ...]


def fits(roots: Sequence[Expr], shape: Shape, captured: Captured) -> bool:
    """True if every integer under `roots` is proved to fit in 64 bits."""
    return _modest(tuple(roots), shape, captured) or not overflowing(roots, shape, captured, bits=64)


def _modest(roots: tuple[Expr, ...], shape: Shape, captured: Captured) -> bool:
    captured = captured.signed()
    assumed = _assumed(roots, tuple([x.dtype for x in captured.operands]))
    if assumed is None or max(shape.q_len, shape.kv_len) > MODEST_LENGTH:
        return False
    if max(shape.batch, shape.heads, shape.b or 0) > MODEST_COUNT:
        return False
    if not all(-MODEST_NUMBER <= captured.scalars[slot] <= MODEST_NUMBER for slot in assumed.numbers):
        return False
    for slot in assumed.tensors:
        table = captured.operands[slot]
        if table.is_meta:
            if captured.largest(slot) > MODEST_NUMBER:
                return False
            continue
        table = contents.on_host(table)
        if table.numel() and not all(-MODEST_NUMBER <= int(end) <= MODEST_NUMBER for end in table.aminmax()):
            return False
    return True


@lru_cache(maxsize=1024)
def _assumed(roots: tuple[Expr, ...], dtypes: Dtypes) -> _Assumed | None:
    """Assumptions under which all integers fit, for any modest shape; None where there are none."""
    wanted = integers(*roots)
    read = slots_read(*wanted)
    narrow = {slot for slot in read if dtypes[slot] == torch.int64}
    if not _proved(roots, wanted, dtypes, narrow):
        return None
    for slot in sorted(narrow):  # most tensors are only compared, or are indices: their contents may be any
        if _proved(roots, wanted, dtypes, narrow - {slot}):
            narrow.remove(slot)
    whole = {node.value for node in wanted if node.op == "scalar"}
    return _Assumed(tuple(sorted(whole)), tuple(sorted(narrow)))


def _proved(roots: tuple[Expr, ...], wanted: tuple[Expr, ...], dtypes: Dtypes, narrow: set[int]) -> bool:
    """True if integers fit while contents of tensors in `narrow` are modest, those of others anything."""
    known: dict[Expr, Bounds] = {}
    for node in nodes(*wanted):
        if node.op == "scalar" or node.op in READS:
            integers = Bounds(-MODEST_NUMBER, MODEST_NUMBER)
            if node.kind == "int" and node.op == "load" and node.value not in narrow:
                integers = of_dtype(dtypes[node.value])
            known[node] = of_captured(node, integers, MODEST_LENGTH)
    lengths = dict.fromkeys((*INDICES, *CONTEXT), Bounds(0, MODEST_LENGTH))
    symbols = lengths | dict.fromkeys(("b", "h", "num_heads"), Bounds(0, MODEST_COUNT))
    result = _ranges(roots, wanted, symbols, Tables(Captured()), known)
    return all(result[node].lo >= -_WORD and result[node].hi < _WORD for node in wanted)


# --- refusing, and deciding beforehand --------------------------------------------------------------------


def refuse_overflow(roots: Sequence[Expr], shape: Shape, captured: Captured) -> None:
    """Raise TooLarge (an UnsupportedError) where integer arithmetic of `roots` might not fit in 64 bits."""
    if not _modest(tuple(roots), shape, captured):
        for node, ends in overflowing(roots, shape, captured, bits=64):
            raise TooLarge(node, ends, shape)


def fitted(roots: Sequence[Expr], shape: Shape, captured: Captured) -> tuple[Expr, ...]:
    """The same values for every element of `shape`, computed within 64 bits.

    Comparisons, minima and maxima of large numbers are replaced by what they are where they are the same for
    all elements. Raises TooLarge (an UnsupportedError) where integers are left that might not fit in 64 bits,
    DividedByZero (an InputError) for an integer division by a constant or captured number that is 0.
    """
    roots = tuple(roots)
    _refuse_zero(roots, captured)
    if _modest(roots, shape, captured):
        return roots
    if slots_read(*integers(*roots)):
        return _fitted(roots, shape, captured)
    numbers = tuple(captured.scalars[slot] for slot in numbers_read(*roots))
    return _remembered(roots, shape, captured.scalars, exactly(*numbers))


@lru_cache(maxsize=256)
def _remembered(
    roots: tuple[Expr, ...], shape: Shape, scalars: tuple[bool | int | float, ...], exact: str
) -> tuple[Expr, ...]:
    """`exact` tells numbers apart that compare equal."""
    return _fitted(roots, shape, Captured((), scalars))


def _fitted(roots: tuple[Expr, ...], shape: Shape, captured: Captured) -> tuple[Expr, ...]:
    ranges = index_ranges(roots, shape, captured)
    large = {node for node, (low, high) in ranges.items() if low < -_SAFE or high > _SAFE}
    if not large:
        return roots
    vague = {node for node in large if node.op in ("shl", "to_int") and max(map(abs, ranges[node])) >= VAGUE}
    decidable = dict.fromkeys(
        node
        for node in nodes(*roots)
        if node.args
        and node.args[0].kind == "int"
        and not large.isdisjoint(nodes(node))
        and vague.isdisjoint(nodes(node))
    )
    decided = _decided(roots, tuple(decidable), shape, captured)
    memo: dict[Expr, Expr] = {}
    for node in nodes(*roots):
        if node in decided:
            memo[node] = const(decided[node])
        else:
            simpler = _simpler(node, ranges, memo) if node in decidable else None
            memo[node] = simpler or rebuild(node, tuple(memo[a] for a in node.args))
    settled = tuple(memo[root] for root in roots)
    refuse_overflow(settled, shape, captured)
    return settled


def _decided(
    roots: tuple[Expr, ...], decidable: Sequence[Expr], shape: Shape, captured: Captured
) -> dict[Expr, bool]:
    """Comparisons that come out the same for every element."""
    asked = [node for node in decidable if node.op in COMPARISONS or node.op == "to_bool"]
    result = _ranges(roots, asked, shape.ranges(), Tables(on_host(captured, *asked)))
    return {node: bool(result[node].lo) for node in asked if result[node].lo == result[node].hi}


def _simpler(node: Expr, ranges: Mapping[Expr, tuple[int, int]], memo: Mapping[Expr, Expr]) -> Expr | None:
    """The argument that a minimum or maximum takes for every element; the float that a large int becomes."""
    if node.op == "to_float":
        low, high = ranges[node.args[0]]
        return to_float(const(low)) if low == high else None
    if node.op not in ("minimum", "maximum"):
        return None
    lower, upper = sorted(node.args, key=lambda x: ranges[x])
    if ranges[lower][1] > ranges[upper][0]:
        return None
    return memo[lower if node.op == "minimum" else upper]


def _refuse_zero(roots: tuple[Expr, ...], captured: Captured) -> None:
    for node in _divisions_by_numbers(roots):
        divisor = node.args[1]
        if (divisor.value if divisor.op == "const" else captured.scalars[divisor.value]) == 0:
            raise DividedByZero(node)


@lru_cache(maxsize=1024)
def _divisions_by_numbers(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Integer divisions whose divisor is a captured number, or the constant 0."""
    divisions = (node for node in nodes(*roots) if node.op in DIVISIONS and node.kind == "int")
    return tuple(
        n for n in divisions if n.args[1].op == "scalar" or (n.args[1].op == "const" and n.args[1].value == 0)
    )
