"""Ends of key intervals that take several dependent reads, as tables with an entry per query row.

A kernel computes the intervals of its rows before it can ask for the first keys. A binary search there waits
for memory once per halving, at every tile of queries; a table is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.intervals import KeyIntervals
from fa4flex.codegen.expr import Expr, load, nodes, sym

MOST_ENTRIES = 1 << 24
"""Largest number of entries of one table (64 MB). An end that varies with more rows, heads and batch entries
is left to the kernel."""

FEWEST_READS = 2
_READS = {"load": 1, "search": FEWEST_READS}
"""Reads in a row: a search is several."""


@dataclass(frozen=True)
class Tabulated:
    """Facts whose key intervals read tables, from slots behind those of the captured tensors, and the ends
    that these tables hold: int32 [B, H, q_len], without the dimensions of (b, h) that an end does not depend
    on."""

    facts: Facts
    ends: tuple[Expr, ...] = ()

    @property
    def operands(self) -> tuple[tuple[str, int], ...]:
        """(dtype name, rank) of each table."""
        return tuple(("int32", len(varying(end)) + 1) for end in self.ends)


def tabulate(facts: Facts, shape: Shape, operands: int) -> Tabulated:
    """The facts of a dense problem of this shape, with `operands` captured tensors."""
    ends = () if facts.keys is None else _tabulated(facts.keys, shape)
    return Tabulated(_reading(facts, ends, operands), ends) if ends else Tabulated(facts)


@lru_cache(maxsize=1024)
def tabulable(facts: Facts) -> bool:
    """Whether tables are made for dense problems of some shapes."""
    ends = () if facts.keys is None else (end for span in facts.keys.spans for end in span)
    return any(dependent_reads(end) >= FEWEST_READS for end in ends)


def _tabulated(keys: KeyIntervals, shape: Shape) -> tuple[Expr, ...]:
    """The ends that tables are made of."""
    ends = dict.fromkeys(end for span in keys.spans for end in span)
    return tuple(
        end for end in ends if dependent_reads(end) >= FEWEST_READS and _entries(end, shape) <= MOST_ENTRIES
    )


@lru_cache(maxsize=512)
def _reading(facts: Facts, ends: tuple[Expr, ...], first: int) -> Facts:
    """Facts whose key intervals read `ends` from operands `first` and those behind it."""
    assert facts.keys is not None
    loads = {}
    for slot, end in enumerate(ends, first):
        loads[end] = load(slot, (*(sym(name) for name in varying(end)), sym("q")), "int")
    spans = tuple((loads.get(lo, lo), loads.get(hi, hi)) for lo, hi in facts.keys.spans)
    return replace(facts, intervals=replace(facts.keys, spans=spans))


@lru_cache(maxsize=1024)
def dependent_reads(root: Expr) -> int:
    """The longest chain of reads of which each needs the result of the one before."""
    depth: dict[Expr, int] = {}
    for node in nodes(root):
        depth[node] = max((depth[arg] for arg in node.args), default=0) + _READS.get(node.op, 0)
    return depth[root]


def varying(end: Expr) -> tuple[str, ...]:
    """The symbols of b and h that an end depends on."""
    return tuple(name for name in ("b", "h") if name in end.free)


def _entries(end: Expr, shape: Shape) -> int:
    return math.prod(extents(end, shape)) * shape.q_len


def extents(end: Expr, shape: Shape) -> list[int]:
    """The extents of these symbols."""
    sizes = {"b": shape.batch, "h": shape.heads}
    return [sizes[name] for name in varying(end)]
