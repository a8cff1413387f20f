"""Integers as narrow dtypes hold them: torch keeps the lowest bits of a value that does not fit.

Expressions hold mathematical integers. A cast to a dtype of 32 bits and less, and arithmetic on what was
cast, therefore is a remainder, which every stage knows. It is left out where the value fits anyway.
"""

from __future__ import annotations

import torch

from fa4flex.codegen.analyze.bounds import Bounds, bounds
from fa4flex.codegen.analyze.rules import ANY_INT, any_float, of_captured, of_dtype
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import READS, Expr, apply, const, walk
from fa4flex.codegen.trace.state import current

NARROW = frozenset((torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32))
"""Dtypes whose arithmetic wraps wherever its operands come from. That of int32 does so after a cast to it:
indices and lengths in captured int32 tensors stay what they are."""
WRAPPING = NARROW | {torch.int32}
_OF_LOWEST_BITS, _WORD = ("add", "sub", "mul", "neg"), 1 << 62
_LONGEST, _MOST = 1 << 24, 1 << 16
"""Lengths, and batch entries or heads, for which arithmetic on an index that was cast is checked."""


def narrowed(x: Expr, dtype: torch.dtype) -> Expr:
    """The integer `x` as a tensor of `dtype` holds it."""
    limits = torch.iinfo(dtype)
    if _within(x, limits.min, limits.max):
        return x
    if x.op in _OF_LOWEST_BITS and not _within(x, -_WORD, _WORD):  # their lowest bits are those of the result
        x = apply(x.op, *(narrowed(a, torch.int32) for a in x.args))
    low, count = const(limits.min), const(limits.max - limits.min + 1)
    return apply("add", apply("mod", apply("sub", x, low), count), low)


def _within(x: Expr, low: int, high: int) -> bool:
    if x.op == "const":
        return bool(low <= x.value <= high)
    known = {node: _read(node) for node in walk(x) if node.op == "scalar" or node.op in READS}
    symbols = {name: Bounds(0, _MOST if name in ("b", "h", "num_heads") else _LONGEST) for name in x.free}
    symbols["score"] = any_float()
    (result,) = bounds([x], symbols, Tables(Captured()), known)
    return bool(result.lo >= low) and bool(result.hi <= high)


def _read(node: Expr) -> Bounds:
    """Range of what is captured, whatever its value."""
    integers = ANY_INT
    if node.kind == "int" and node.op == "load":
        integers = of_dtype(current().captures.operands[node.value].dtype)
    return of_captured(node, integers, _LONGEST)
