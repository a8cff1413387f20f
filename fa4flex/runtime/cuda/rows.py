"""Ends of key intervals that take several dependent reads, as tables with an entry per query row.

A kernel computes the intervals of its rows before it can ask for the first keys. A binary search there waits
for memory once per halving, at every tile of queries; a table is read once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape, numbers_read, on_host, slots_read
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.intervals import KeyIntervals
from fa4flex.codegen.analyze.rows import looked_up, one_thread
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, load, nodes, sym
from fa4flex.contents import MOST_BYTES, Kept
from fa4flex.runtime.cuda.upload import upload

MOST_ENTRIES = 1 << 24
"""Of one table (64 MB). An end that varies with more rows, heads and batch entries is left to the kernel."""

AT_ONCE = 1 << 20
"""Entries of a table that are computed together."""

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
    wanted = () if keys is None else _tabulated(keys, shape)
    if not wanted:
        return facts, ()
    read, numbers = sorted(slots_read(*wanted)), numbers_read(*wanted)
    key = wanted, shape, repr([captured.scalars[slot] for slot in numbers]), device
    seen = [captured.operands[slot] for slot in read]
    tables = _kept.made(key, seen, lambda: _tables(wanted, shape, captured, device))
    return _reading(facts, wanted, len(captured.operands)), tables


_kept: Kept[tuple[Tensor, ...]] = Kept(64, MOST_BYTES, lambda tables: sum(x.nbytes for x in tables))
"""Tables on devices: one for the forward and the backward pass, and for all programs with the same ends."""


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
        loads[end] = load(slot, (*(sym(name) for name in _varying(end)), sym("q")), "int")
    spans = tuple((loads.get(lo, lo), loads.get(hi, hi)) for lo, hi in facts.keys.spans)
    return replace(facts, intervals=replace(facts.keys, spans=spans))


@lru_cache(maxsize=1024)
def dependent_reads(root: Expr) -> int:
    """The longest chain of reads of which each needs the result of the one before."""
    depth: dict[Expr, int] = {}
    for node in nodes(root):
        depth[node] = max((depth[arg] for arg in node.args), default=0) + _READS.get(node.op, 0)
    return depth[root]


def _varying(end: Expr) -> tuple[str, ...]:
    return tuple(name for name in ("b", "h") if name in end.free)


def _entries(end: Expr, shape: Shape) -> int:
    return math.prod(_extents(end, shape)) * shape.q_len


def _tables(
    ends: tuple[Expr, ...], shape: Shape, captured: Captured, device: torch.device
) -> tuple[Tensor, ...]:
    with one_thread():
        read, here = looked_up(ends, on_host(captured, *ends))
        # One (b, h) after another where rows are many, and where a search in one vector is a binary one.
        singly = any(node.op == "search" and len(node.args) > 1 for node in nodes(*read))
        if singly or shape.batch * shape.heads * shape.q_len > AT_ONCE:
            tables = [_one_by_one(end, shape, here) for end in read]
        else:
            tables = _together(read, shape, here)
        return tuple(upload(tables, device))


def _clipped(end: Any, shape: Shape) -> Tensor:
    """As a kernel does too, so that every end fits into 32 bits."""
    return torch.as_tensor(end).clamp(0, shape.kv_len).to(torch.int32)


def _symbols(shape: Shape) -> dict[str, Any]:
    lengths = {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}
    return lengths | {"q": torch.arange(shape.q_len)}


def _extents(end: Expr, shape: Shape) -> list[int]:
    extents = {"b": shape.batch, "h": shape.heads}
    return [extents[name] for name in _varying(end)]


def _one_by_one(end: Expr, shape: Shape, captured: Captured) -> Tensor:
    sizes, symbols = _extents(end, shape), _symbols(shape)
    found = torch.empty([*sizes, shape.q_len], dtype=torch.int32)
    for place in product(*map(range, sizes)):
        at = symbols | dict(zip(_varying(end), place, strict=True))
        (value,) = evaluate([end], at, captured)
        found[place] = _clipped(value, shape)
    return found


def _together(ends: tuple[Expr, ...], shape: Shape, captured: Captured) -> list[Tensor]:
    at = _symbols(shape)
    at |= {"b": torch.arange(shape.batch).view(-1, 1, 1), "h": torch.arange(shape.heads).view(-1, 1)}
    found = []
    for end, value in zip(ends, evaluate(ends, at, captured), strict=True):
        sizes = [n if name in end.free else 1 for name, n in (("b", shape.batch), ("h", shape.heads))]
        whole = _clipped(value, shape).expand(*sizes, shape.q_len)
        found.append(whole.reshape(*_extents(end, shape), shape.q_len))
    return found
