"""The problem a mask is asked about: its extents, and the ranges of the symbols over it."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.codegen.analyze.rules import Bounds
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, const, substitute, sym, walk

READS = ("load", "search")


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
        found = {name: Bounds(0, max(end, 0)) for name, end in last.items()}
        found |= {name: Bounds(value, value) for name, value in lengths.items()}
        if self.b is not None:
            found["b"] = Bounds(self.b, self.b)
        return found

    def values(self) -> dict[str, int]:
        """Symbols that have one value in this problem."""
        return {name: x.lo for name, x in self.ranges().items() if x.lo == x.hi and name not in ("q", "kv")}


def bind(root: Expr, shape: Shape, captured: Captured) -> Expr:
    """`root` for this problem alone: lengths and captured numbers become constants, and fold."""
    replacement = {sym(name): const(value) for name, value in shape.values().items()}
    as_kind = {"bool": bool, "int": int, "float": float}
    for node in walk(root):
        if node.op == "scalar":
            replacement[node] = const(as_kind[node.kind](captured.scalars[node.value]))
    return substitute(root, replacement)


def on_host(captured: Captured, *roots: Expr) -> Captured:
    """The tensors that `roots` read, where the analysis runs and without gradients; others as they are."""
    read = {node.value if node.op == "load" else node.value[0] for node in walk(*roots) if node.op in READS}
    operands = enumerate(captured.operands)
    return Captured(tuple(x.detach().cpu() if i in read else x for i, x in operands), captured.scalars)
