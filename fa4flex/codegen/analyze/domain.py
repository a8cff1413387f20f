"""The problem a mask is asked about: its extents, and the ranges of the symbols over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fa4flex import contents
from fa4flex.codegen.analyze.rules import Bounds
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import READS, Expr, const, slot_of, substitute, sym, walk
from fa4flex.exact import exactly


@dataclass(frozen=True)
class Shape:
    """One dense problem, or one sequence of a varlen batch; then `b` is its place in the batch."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    b: int | None = None

    def ranges(self) -> dict[str, Bounds]:
        """The range of each symbol over the whole problem, with Python ends."""
        lengths = {"q_len": self.q_len, "kv_len": self.kv_len, "num_heads": self.heads}
        last = {"b": self.batch - 1, "h": self.heads - 1, "q": self.q_len - 1, "kv": self.kv_len - 1}
        results = {name: Bounds(0, max(end, 0)) for name, end in last.items()}
        results |= {name: Bounds(value, value) for name, value in lengths.items()}
        if self.b is not None:
            results["b"] = Bounds(self.b, self.b)
        return results

    def values(self) -> dict[str, int]:
        """Symbols that have one value in this problem."""
        return {name: x.lo for name, x in self.ranges().items() if x.lo == x.hi and name not in ("q", "kv")}


@dataclass(frozen=True)
class Ragged(Shape):
    """Sequences of unknown lengths, up to q_len and kv_len."""

    def ranges(self) -> dict[str, Bounds]:
        return super().ranges() | {"q_len": Bounds(0, self.q_len), "kv_len": Bounds(0, self.kv_len)}


def bind(root: Expr, shape: Shape, captured: Captured) -> Expr:
    """`root` for this problem alone: lengths and captured numbers become constants, and fold."""
    values = shape.values()
    here = tuple((name, values[name]) for name in sorted(root.free & values.keys()))
    numbers = tuple((slot, captured.scalars[slot]) for slot in numbers_read(root))
    return _bound(root, here, numbers, exactly(*numbers))


@lru_cache(maxsize=1024)
def numbers_read(*roots: Expr) -> tuple[int, ...]:
    """The slots of the captured numbers that are read under `roots`."""
    return tuple(sorted({node.value for node in walk(*roots) if node.op == "scalar"}))


@lru_cache(maxsize=1024)
def _bound(
    root: Expr, values: tuple[tuple[str, int], ...], numbers: tuple[tuple[int, float], ...], exact: str
) -> Expr:
    """`exact` tells numbers apart that compare equal: 0.0 from -0.0."""
    replacement = {sym(name): const(value) for name, value in values}
    as_kind, by_slot = {"bool": bool, "int": int, "float": float}, dict(numbers)
    for node in walk(root):
        if node.op == "scalar":
            replacement[node] = const(as_kind[node.kind](by_slot[node.value]))
    return substitute(root, replacement)


def on_host(captured: Captured, *roots: Expr) -> Captured:
    """The tensors that `roots` read, where the analysis runs and without gradients; others as they are.

    Raises UnsupportedError where an element of a uint64 tensor does not fit in int64.
    """
    read, operands = slots_read(*roots), enumerate(captured.operands)
    there = tuple(contents.on_host(x) if i in read and not x.is_meta else x for i, x in operands)
    return replace(captured, operands=there).signed()


@lru_cache(maxsize=1024)
def slots_read(*roots: Expr) -> frozenset[int]:
    """The slots of the captured tensors that are read under `roots`."""
    return frozenset(slot_of(node) for node in walk(*roots) if node.op in READS)
