"""Hoisting: the largest subexpressions that depend on the query alone, the key alone, or on neither.

A kernel computes a row term once per query row, a column term once per key and a uniform term once per
(batch, head); what is left runs once per score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa4flex.codegen.expr import Expr, brief, loops, walk

Frequency = Literal["uniform", "row", "column", "element"]


@dataclass(frozen=True)
class Hoisting:
    """Maximal non-leaf subexpressions by how often they must be computed, and the count left per element."""

    uniform: tuple[Expr, ...]
    row: tuple[Expr, ...]
    column: tuple[Expr, ...]
    element_operations: int

    def explain(self) -> str:
        parts = [
            f"{len(terms)} once per {unit} ({', '.join(map(brief, terms))})"
            for unit, terms in (("head", self.uniform), ("query row", self.row), ("key", self.column))
            if terms
        ]
        return "; ".join([*parts, f"{self.element_operations} operations per score"])


def frequency(node: Expr) -> Frequency:
    """Frequency at which hoisting lets `node` be computed; generated code tells more rates apart
    (emit/nodes.py)."""
    if "score" in node.free or {"q", "kv"} <= node.free:
        return "element"
    return "row" if "q" in node.free else "column" if "kv" in node.free else "uniform"


def read_by_pairs(node: Expr) -> bool:
    """True for a load that has as many elements as there are scores: q stands in one place of its index, and
    kv in another one."""
    places = [i.free & {"q", "kv"} for i in node.args] if node.op == "load" else []
    return {"q"} in places and {"kv"} in places


def reads_by_blocks(root: Expr) -> bool:
    """True if an element that is read belongs to a block of keys, as in a map of blocks."""
    places = [i for node in walk(root) if node.op == "load" for i in node.args]
    return any(node.op == "floordiv" and "kv" in node.free for i in places for node in walk(i))


def hoist(*roots: Expr) -> Hoisting:
    """Cut the graph of `roots` where what is computed less often feeds what is computed more often."""
    nodes = list(walk(*roots))  # arguments before their users, and each node once
    users: dict[Expr, list[Expr]] = {node: [] for node in nodes}
    for node in nodes:
        for argument in node.args:
            users[argument].append(node)
    bound = loops(*roots).keys()
    results: dict[str, list[Expr]] = {"uniform": [], "row": [], "column": []}
    for node in nodes:
        mine = frequency(node)
        # Leaves cost nothing, and a term under a reduction's axis only exists inside its loop.
        if mine == "element" or not node.args or node.free & bound:
            continue
        if not users[node] or any(frequency(user) != mine for user in users[node]):
            results[mine].append(node)
    per_element = sum(1 for node in nodes if frequency(node) == "element" and node.args)
    return Hoisting(tuple(results["uniform"]), tuple(results["row"]), tuple(results["column"]), per_element)
