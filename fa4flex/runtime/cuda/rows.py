"""Ends of key intervals that take several dependent reads, as tables with an entry per query row.

A kernel computes the intervals of its rows before it can ask for the first keys. A binary search there waits
for memory once per halving, at every tile of queries; a table is read once.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape, on_host
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, load, sym, walk

MOST_ENTRIES = 1 << 24
"""Of one table (64 MB). An end that varies with more rows, heads and batch entries is left to the kernel."""

FEWEST_READS = 2
_READS = {"load": 1, "search": FEWEST_READS}
"""Reads in a row: a search is several."""


def tabulate(
    facts: Facts, shape: Shape, captured: Captured, device: torch.device
) -> tuple[Facts, tuple[Tensor, ...]]:
    """Facts whose key intervals read tables instead, and the tables, behind the captured tensors' slots.

    Tables are int32 [B, H, q_len] on `device`, without the dimensions of (b, h) that an end does not depend
    on. They hold for dense problems of `shape` and the contents of `captured` as they are now.
    """
    keys = facts.keys
    if keys is None:
        return facts, ()
    here = on_host(captured, *(end for span in keys.spans for end in span))
    loads: dict[Expr, Expr] = {}
    tables: list[Tensor] = []
    for end in dict.fromkeys(end for span in keys.spans for end in span):
        if dependent_reads(end) >= FEWEST_READS and _entries(end, shape) <= MOST_ENTRIES:
            index = (*(sym(name) for name in _varying(end)), sym("q"))
            loads[end] = load(len(captured.operands) + len(tables), index, "int")
            tables.append(_table(end, shape, here).to(device))
    if not loads:
        return facts, ()
    spans = tuple((loads.get(lo, lo), loads.get(hi, hi)) for lo, hi in keys.spans)
    return replace(facts, intervals=replace(keys, spans=spans)), tuple(tables)


def dependent_reads(root: Expr) -> int:
    """The longest chain of reads of which each needs the result of the one before."""
    depth: dict[Expr, int] = {}
    for node in walk(root):
        depth[node] = max((depth[arg] for arg in node.args), default=0) + _READS.get(node.op, 0)
    return depth[root]


def _varying(end: Expr) -> tuple[str, ...]:
    return tuple(name for name in ("b", "h") if name in end.free)


def _entries(end: Expr, shape: Shape) -> int:
    extents = {"b": shape.batch, "h": shape.heads}
    total = shape.q_len
    for name in _varying(end):
        total *= extents[name]
    return total


def _table(end: Expr, shape: Shape, captured: Captured) -> Tensor:
    """Rows one (b, h) after another: a search in one vector is a binary one. Clipped, as a kernel does too,
    so that every end fits into 32 bits."""
    symbols = {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}
    extents = {"b": shape.batch, "h": shape.heads}
    names = _varying(end)
    rows = torch.arange(shape.q_len)
    found = torch.empty([*(extents[name] for name in names), shape.q_len], dtype=torch.int32)
    for place in product(*(range(extents[name]) for name in names)):
        at = symbols | dict(zip(names, place, strict=True)) | {"q": rows}
        (value,) = evaluate([end], at, captured)
        found[place] = torch.as_tensor(value).clamp(0, shape.kv_len).to(torch.int32)
    return found
