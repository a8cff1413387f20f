"""Masks along diagonals: whether one looks alike wherever queries and keys move on together."""

from __future__ import annotations

from functools import lru_cache

from fa4flex.codegen.expr import Expr, walk

_SAME = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "sub"})
"""Operations of two numbers whose result stays as it is where both grow alike."""
_ENDS = frozenset({"minimum", "maximum"})


@lru_cache(maxsize=256)
def follows_diagonals(mask: Expr) -> bool:
    """True if mask(q + n, kv + n) is surely mask(q, kv) for every n, whatever it captured."""
    steps: dict[Expr, int | None] = {}
    for node in walk(mask):
        steps[node] = _step(node, [steps[x] for x in node.args])
    return steps[mask] == 0


def _step(node: Expr, arguments: list[int | None]) -> int | None:
    """Gain of an integer where q and kv both grow by 1; 0 for what stays as it is, None if unknown."""
    if node.op == "sym":
        return int(node.value in ("q", "kv"))
    if all(x == 0 for x in arguments):
        return 0
    if None in arguments or any(x.kind != "int" for x in node.args):  # floats are rounded
        return None
    known = [x for x in arguments if x is not None]
    if node.op == "add":
        return sum(known)
    if node.op in _SAME and known[0] == known[1]:
        return 0
    if node.op == "sub":
        return known[0] - known[1]
    return known[0] if node.op in _ENDS and known[0] == known[1] else None
