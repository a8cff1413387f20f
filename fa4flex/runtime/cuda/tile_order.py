"""Tiles of queries of a ragged batch, those with most keys first.

Blocks that take tiles in this order end at about the same time: the longest do not come last (Graham 1969,
list scheduling by longest processing time). The order is computed where the lengths are, without waiting for
them, once per set of lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import walk
from fa4flex.contents import VersionedCache
from fa4flex.runtime.cuda.block_tables import capturing, stream_of
from fa4flex.runtime.cuda.call import Call

MOST_KEPT = 16
"""Orders, of as many sets of lengths."""


@dataclass(frozen=True)
class Sequences:
    """Place of every tile, int64 [tiles]: its sequence, the number of sequences where there is no such tile;
    its number in the sequence; and the sequence's lengths."""

    b: Tensor
    tile: Tensor
    q_len: Tensor
    kv_len: Tensor


@dataclass(eq=False, slots=True)
class TileOrder:
    """For one program, and tiles of `tile_m` queries; called with a call, it returns the order as int32
    [tiles, 2]: sequence and tile, tiles that do not exist last."""

    facts: Facts
    tile_m: int
    numbers: tuple[int | float, ...]
    _kept: VersionedCache[Tensor] = field(default_factory=lambda: VersionedCache(MOST_KEPT))

    def __call__(self, call: Call) -> Tensor:
        lengths = [x for x in call.lengths if x is not None]
        if capturing(call.q):
            return self.compute(call)  # in the graph's memory
        key = stream_of(call.q), call.q.shape, call.k.shape
        return self._kept.made(key, lengths, lambda: self.compute(call))

    @torch.no_grad()
    def compute(self, call: Call) -> Tensor:
        tiles = _packed(call, self.tile_m) if call.packed else _padded(call, self.tile_m)
        exists = tiles.tile * self.tile_m < tiles.q_len
        work = torch.where(exists, self.keys(call, tiles), -1)
        order = torch.sort(work, descending=True, stable=True).indices
        b = torch.where(exists, tiles.b, call.extents().batch)
        return torch.stack([b[order], tiles.tile[order]], 1).to(torch.int32)

    def keys(self, call: Call, tiles: Sequences) -> Tensor:
        """How many keys lie between the ends of the spans of a tile's first and last row; those of the whole
        sequence where the spans are not known without reading tensors."""
        spans = () if self.facts.keys is None else self.facts.keys.spans
        ends = [end for span in spans for end in span]
        if not ends or any(node.op in ("load", "search") for node in walk(*ends)):
            return tiles.kv_len
        first = tiles.tile * self.tile_m
        last = torch.minimum(first + self.tile_m, tiles.q_len) - 1
        zero = torch.zeros_like(first)
        found = [[end + zero for end in self._ends(call, tiles, q, ends)] for q in (first, last)]
        total = zero
        for lo, hi in zip(range(0, len(ends), 2), range(1, len(ends), 2), strict=True):
            start = torch.minimum(found[0][lo], found[1][lo]).clamp(min=0)
            stop = torch.minimum(torch.maximum(found[0][hi], found[1][hi]), tiles.kv_len)
            total = total + (stop - start).clamp(min=0)
        return total

    def _ends(self, call: Call, tiles: Sequences, q: Tensor, ends: list[Any]) -> list[Any]:
        symbols: dict[str, Any] = {"b": tiles.b, "h": 0, "q": q, "q_len": tiles.q_len, "kv_len": tiles.kv_len}
        symbols["num_heads"] = call.extents().heads
        return list(evaluate(ends, symbols, Captured(call.operands, self.numbers)))


def _packed(call: Call, tile_m: int) -> Sequences:
    """Tiles of packed sequences, as many as there can be: every sequence may end in one that is not full."""
    cu_q, cu_k, used_q, used_k = call.lengths
    assert cu_q is not None and cu_k is not None
    q_len, kv_len = cu_q.diff().long(), cu_k.diff().long()
    if used_q is not None:
        q_len = torch.minimum(q_len, used_q)
    if used_k is not None:
        kv_len = torch.minimum(kv_len, used_k)
    batch = len(q_len)
    counts = (q_len + (tile_m - 1)) // tile_m
    past = counts.cumsum(0)
    number = torch.arange(call.q.shape[0] // tile_m + batch, device=q_len.device)
    b = torch.searchsorted(past, number, right=True)
    safe = b.clamp(max=batch - 1)
    return Sequences(b, number - (past - counts)[safe], torch.where(b < batch, q_len[safe], 0), kv_len[safe])


def _padded(call: Call, tile_m: int) -> Sequences:
    shape, (_, _, used_q, used_k) = call.extents(), call.lengths
    per = -(-shape.q_len // tile_m)
    number = torch.arange(shape.batch * per, device=call.q.device)
    b = number // per

    def lengths(used: Tensor | None, whole: int) -> Tensor:
        return torch.full_like(b, whole) if used is None else used.long()[b]

    return Sequences(b, number % per, lengths(used_q, shape.q_len), lengths(used_k, shape.kv_len))
