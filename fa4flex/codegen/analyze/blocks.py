"""Blocks of a map that a mask reads: an element of a captured tensor for each block of queries and keys."""

from __future__ import annotations

from functools import lru_cache

from fa4flex.codegen.expr import Expr, loads

Numbers = tuple[bool | int | float, ...]


def block_size(mask: Expr, scalars: Numbers) -> tuple[int, int] | None:
    """(queries, keys) of the blocks of a map that the mask reads; None where it reads none, or maps of
    different blocks. scalars: captured numbers by slot."""
    results = {pair for pair in map(_divisors, _reads(mask)) if pair is not None}
    if len(results) != 1:
        return None
    rows, columns = (x.value if x.op == "const" else scalars[x.value] for x in results.pop())
    return int(rows), int(columns)


@lru_cache(maxsize=256)
def _reads(mask: Expr) -> tuple[Expr, ...]:
    return tuple(loads(mask))


def _divisors(load: Expr) -> tuple[Expr, Expr] | None:
    """Divisors of queries and of keys in the indices of a captured tensor, if it has both. Maps of sequences
    are read up to their last row and column."""
    results = {}
    for index in load.args:
        if index.op == "floordiv" and index.args[1].op in ("const", "scalar"):
            of = index.args[0]
            of = of.args[0] if of.op == "minimum" else of
            if of.op == "sym":
                results[of.value] = index.args[1]
    return (results["q"], results["kv"]) if {"q", "kv"} <= results.keys() else None
