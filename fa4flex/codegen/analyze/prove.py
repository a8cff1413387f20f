"""Proofs about a program over the extents of a call: the form of its mask, and the ranges of its indices.

Proofs read lengths and captured numbers, never the contents of captured tensors, which may change at every
call: what a mask needs to know of them, block tables hold (kernels/block_tables), and an index that is made
of them is clamped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import Ragged, Shape, numbers_read, slots_read
from fa4flex.codegen.analyze.facts import Facts, MaskForm
from fa4flex.codegen.analyze.intervals import MOST_SPANS, Intervals, searched
from fa4flex.codegen.analyze.overflow import integers, overflowing, refuse_overflow
from fa4flex.codegen.analyze.rules import Bounds, any_float
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tiles import unmet
from fa4flex.codegen.evaluate import Captured, PastTheEnd
from fa4flex.codegen.expr import FALSE, INDICES, READS, TRUE, Expr, index_of, loops, nodes, slot_of
from fa4flex.exact import exactly


@dataclass(frozen=True)
class Proved:
    """Facts proved of a program over the extents of a call; see Problem for the meaning of each."""

    mask_form: MaskForm
    wide_index: bool
    in_range: bool
    row_ends: int = 0


@dataclass(frozen=True)
class Watched:
    """Slots of the operands that block tables of a mask are made of, and of the captured numbers that proofs
    read."""

    slots: frozenset[int]
    numbers: tuple[int, ...]

    def numbers_of(self, numbers: tuple[int | float, ...]) -> str:
        """Text that tells numbers apart that compare equal: 0.0 from -0.0."""
        return exactly(*[numbers[slot] for slot in self.numbers])


@lru_cache(maxsize=1024)
def watched(facts: Facts) -> Watched:
    """Integers of scores may be indices. Floats of which no integer is made are looked up at each launch and
    decide nothing before it."""
    certain = facts.mask is TRUE or (_few(facts.keys) and facts.keys.certain)  # type: ignore[union-attr]
    read = frozenset[int]() if certain else slots_read(facts.mask)
    return Watched(read, numbers_read(facts.mask, *integers(facts.score)))


def proving() -> AbstractContextManager[Any]:
    """Within, tensors are made on the host, where proofs run, whatever torch's default device is.

    The mode that sees to it takes a call of a Python function per operation: only where one is needed.
    """
    return contextlib.nullcontext() if torch.empty(0).is_cpu else torch.device("cpu")


def prove(facts: Facts, shape: Shape, captured: Captured, of_scores: tuple[str, ...] = ("b", "h")) -> Proved:
    """Raises PastTheEnd where a batch entry, a head, or a mask's row or key has no element in a tensor.
    of_scores: symbols that may not run past a tensor that a score reads."""
    roots = (facts.score, facts.mask, *_ends(facts))
    tables = Tables(captured.unread().signed())
    refuse_overflow((facts.score, facts.mask), shape, tables.captured)
    form, wide = _mask_form(facts, shape, tables), bool(overflowing(roots, shape, tables.captured))
    in_range = _in_range(roots, _never_past(facts, shape, of_scores), shape, tables)
    known = form == "tables" and not wide and _hold_in_order(facts, shape, tables)
    return Proved(form, wide, in_range, len(facts.keys.spans) if known else 0)  # type: ignore[union-attr]


@dataclass(frozen=True)
class ProvedQueries:
    """Facts proved of the ends of query intervals."""

    wide_index: bool
    in_range: bool


@lru_cache(maxsize=1024)
def read_queries(facts: Facts) -> bool:
    """True if kernels could compute which queries see a key, and need not ask memory one question after
    another for it."""
    if facts.mask in (TRUE, FALSE) or not _few(facts.queries):
        return False
    assert facts.queries is not None
    return all(_dependent_reads(end) < FEWEST_READS for span in facts.queries.spans for end in span)


FEWEST_READS = 2
_READS = {"load": 1, "search": FEWEST_READS}
"""Reads in a row: a search is several."""


def _dependent_reads(root: Expr) -> int:
    """The longest chain of reads of which each needs the result of the one before."""
    depth: dict[Expr, int] = {}
    for node in nodes(root):
        depth[node] = max((depth[arg] for arg in node.args), default=0) + _READS.get(node.op, 0)
    return depth[root]


def prove_queries(facts: Facts, shape: Shape, captured: Captured) -> ProvedQueries | None:
    """None where kernels cannot compute which queries see a key."""
    if not read_queries(facts):
        return None
    assert facts.queries is not None
    ends = [end for span in facts.queries.spans for end in span]
    tables = Tables(captured.unread().signed())
    if unmet(facts.queries, shape, tables):
        return None
    in_range = _in_range(ends, _never_past(facts, shape), shape, tables)
    return ProvedQueries(bool(overflowing(ends, shape, tables.captured)), in_range)


def _mask_form(facts: Facts, shape: Shape, tables: Tables) -> MaskForm:
    if facts.mask is TRUE:
        return "none"
    usable = _few(facts.keys) and not unmet(facts.keys, shape, tables)  # type: ignore[arg-type]
    return "spans" if usable else "tables"


def _hold_in_order(facts: Facts, shape: Shape, tables: Tables) -> bool:
    """True if a row's key intervals hold wherever the captured tensors that they search are sorted."""
    keys = facts.keys
    if keys is None or not _few(keys) or unmet(keys, shape, tables, order=False):
        return False
    if {x.value for x in searched(keys)} != keys.sorted_operands:
        return False  # an end that searches was left out, and with it what has to be sorted
    # An index past the end reads the last element, and a search knows of none.
    return _in_range((facts.mask, *_ends(facts)), _never_past(facts, shape), shape, tables)


def _few(keys: Intervals | None) -> bool:
    return keys is not None and 0 < len(keys.spans) <= MOST_SPANS


def _ends(facts: Facts) -> tuple[Expr, ...]:
    """The ends of the key intervals, which a kernel computes, where it uses them: those that are the mask, or
    that it allows."""
    if facts.mask in (TRUE, FALSE):
        return ()
    sets = [x for x in (facts.keys, facts.allowed) if x is not None and _few(x)]
    return tuple(dict.fromkeys(end for keys in sets for span in keys.spans for end in span))


def _never_past(
    facts: Facts, shape: Shape, of_scores: tuple[str, ...] = ("b", "h")
) -> dict[Expr, tuple[str, ...]]:
    """The symbols that may not run past the table of each read: masks are asked about every pair, scores
    about allowed ones, and the lengths of ragged sequences are not known."""
    results: dict[Expr, tuple[str, ...]] = dict.fromkeys(nodes(facts.score), of_scores)
    results |= dict.fromkeys(nodes(facts.mask), ("b", "h") if isinstance(shape, Ragged) else INDICES)
    return results


def _in_range(
    roots: Sequence[Expr], never_past: dict[Expr, tuple[str, ...]], shape: Shape, tables: Tables
) -> bool:
    """True if every index is proved to lie within its captured tensor, without counting from the end."""
    reads = [node for node in nodes(*roots) if node.op in READS]
    axes = {axis: Bounds(0, extent - 1) for axis, extent in loops(*roots).items()}
    symbols = shape.ranges() | axes | {"score": any_float()}
    proved = True
    for node in reads:
        table = tables.captured.operands[slot_of(node)]
        index = index_of(node)
        for i, result, size in zip(index, bounds(index, symbols, tables), table.shape, strict=False):
            if i.op == "sym" and i.value in never_past.get(node, ()) and result.hi >= size:
                raise PastTheEnd(table, f"{i} goes up to {result.hi} in a dimension of {size}", node)
            proved = proved and bool(result.lo >= 0 and result.hi < size)
    return proved
