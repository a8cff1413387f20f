"""Contents of the tables that key intervals are read from (see codegen/analyze/tabulate.py)."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape, numbers_read, on_host, slots_read
from fa4flex.codegen.analyze.rows import looked_up, one_thread
from fa4flex.codegen.analyze.tabulate import extents, varying
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, nodes
from fa4flex.contents import MOST_BYTES, VersionedCache
from fa4flex.runtime.cuda.upload import upload

AT_ONCE = 1 << 20
"""Entries of a table that are computed together."""


def interval_tables(
    ends: tuple[Expr, ...], shape: Shape, captured: Captured, device: torch.device
) -> tuple[Tensor, ...]:
    """A table for each end: int32 [B, H, q_len] on `device`, without the dimensions of (b, h) that it does
    not depend on. They hold for `shape` and the contents of `captured` as they are now."""
    if not ends:
        return ()
    read, numbers = sorted(slots_read(*ends)), numbers_read(*ends)
    key = ends, shape, repr([captured.scalars[slot] for slot in numbers]), device
    seen = [captured.operands[slot] for slot in read]
    return _kept.made(key, seen, lambda: _tables(ends, shape, captured, device))


_kept: VersionedCache[tuple[Tensor, ...]] = VersionedCache(
    64, MOST_BYTES, lambda tables: sum(x.nbytes for x in tables)
)
"""Tables on devices: one for the forward and the backward pass, and for all programs with the same ends."""


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
    """Clip an end to the keys, as a kernel does too, so that every end fits into 32 bits."""
    return torch.as_tensor(end).clamp(0, shape.kv_len).to(torch.int32)


def _symbols(shape: Shape) -> dict[str, Any]:
    lengths = {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}
    return lengths | {"q": torch.arange(shape.q_len)}


def _one_by_one(end: Expr, shape: Shape, captured: Captured) -> Tensor:
    sizes, symbols = extents(end, shape), _symbols(shape)
    found = torch.empty([*sizes, shape.q_len], dtype=torch.int32)
    for place in product(*map(range, sizes)):
        at = symbols | dict(zip(varying(end), place, strict=True))
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
        found.append(whole.reshape(*extents(end, shape), shape.q_len))
    return found
