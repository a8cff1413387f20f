"""Tile classes from key intervals: each row's spans, evaluated exactly, then counted per tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.intervals import KeyIntervals
from fa4flex.codegen.analyze.tilemap import RunBuilder
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, load, nodes, substitute
from fa4flex.contents import Alike

AT_ONCE = 1 << 15
"""Rows, or tiles, handled in one step: bounds the memory of a plan whatever its size."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations on a few thousand rows cost less than handing them to threads, above all on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- searches that need none ------------------------------------------------------------------------------


def looked_up(ends: Sequence[Expr], captured: Captured) -> tuple[tuple[Expr, ...], Captured]:
    """The same ends, which read where a run of equal elements begins and ends instead of searching a table
    for an element of itself, as they do for documents; the tables must be sorted."""
    changed, slots = _looked_up(tuple(ends), len(captured.operands))
    tables = [captured.operands[slot] for slot in slots]
    runs = [part for table in tables for part in _runs.made(None, (table,), partial(runs_of, table))]
    return changed, Captured((*captured.operands, *runs), captured.scalars)


@lru_cache(maxsize=512)
def _looked_up(ends: tuple[Expr, ...], free: int) -> tuple[tuple[Expr, ...], tuple[int, ...]]:
    """Ends that read operands `free` and those behind it: two of each of the slots, which come second."""
    results: dict[Expr, Expr] = {}
    slots: list[int] = []
    for node in nodes(*ends):
        if node.op != "search":
            continue
        (slot, side), (needle, *lead) = node.value, node.args
        if needle.op == "load" and needle.value == slot and needle.args[:-1] == tuple(lead):
            if slot not in slots:
                slots.append(slot)
            results[node] = load(free + 2 * slots.index(slot) + (side == "right"), needle.args, "int")
    return tuple(substitute(end, results) for end in ends), tuple(slots)


_runs: Alike[tuple[Tensor, Tensor]] = Alike(64, 2)
"""Runs of tables on the host, by their elements."""


def runs_of(table: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and end of the run of equals that each element of a table lies in, int64 in the table's shape;
    the table is sorted along its last dimension."""
    size = table.shape[-1]
    if not table.numel():
        return torch.zeros_like(table, dtype=torch.int64), torch.zeros_like(table, dtype=torch.int64)
    first = pad(table[..., 1:] != table[..., :-1], (1, 0), value=True).flatten()
    begins = first.nonzero().squeeze(1)
    ends = pad(begins[1:], (0, 1), value=table.numel())
    lengths, row = ends - begins, begins // size * size
    begins, ends = ((x - row).repeat_interleave(lengths, output_size=table.numel()) for x in (begins, ends))
    return begins.view(table.shape), ends.view(table.shape)


# --- rows of tiles ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiles:
    """Keys lo .. hi - 1 of each row of some tiles, int32 [spans, tiles, rows of a tile]; a span without keys
    lies past the last one. columns, kv_len: of their sequences, numbers or [tiles, 1]."""

    lo: Tensor
    hi: Tensor
    columns: Any
    kv_len: Any


class IntervalRows:
    """Classifies tiles of one mask whose key intervals are known to hold: all tiles, exactly.

    `lengths` of a ragged batch, int64 [batch] of queries and of keys: `shape` then has the longest.
    """

    def __init__(
        self,
        keys: KeyIntervals,
        shape: Shape,
        tile: tuple[int, int],
        captured: Captured,
        lengths: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.shape, self.tile, self.lengths = shape, tile, lengths
        self.rows, self.columns = -(-shape.q_len // tile[0]), -(-shape.kv_len // tile[1])
        ends = [end for span in keys.spans for end in span]
        self.ends, captured = looked_up(ends, captured)
        # Needles are int64; searching needs tables of the same type.
        searched = {node.value[0] for node in nodes(*self.ends) if node.op == "search"}
        operands = enumerate(captured.operands)
        wide = tuple(x.long() if slot in searched else x for slot, x in operands)
        self.captured = Captured(wide, captured.scalars)
        # A search in one vector is a binary one: then one map after another.
        self.singly = any(node.op == "search" and len(node.args) > 1 for node in nodes(*self.ends))

    def append_to(self, builder: RunBuilder, maps: tuple[int, int]) -> Tensor | None:
        """Append the runs of all rows of tiles of all maps, (maps of batch entries, maps of heads). Of a
        ragged batch, the rows that there are among those of the longest sequences."""
        places = torch.arange(maps[0] * maps[1] * self.rows)
        if self.lengths is not None:
            there = places % self.rows * self.tile[0] < self.lengths[0][places // (self.rows * maps[1])]
            places = places[there]
        of_maps = [places] if len(places) else []
        if self.singly:
            of_maps = list(places.split((places // max(self.rows, 1)).unique(return_counts=True)[1].tolist()))
        for part in of_maps:
            for some in part.split(max(AT_ONCE // self.tile[0], 1)):
                tiles = self._tiles_at(some, maps)
                if len(tiles.lo) > 1 or not self._append_hulls(builder, tiles):
                    self._append_counted(builder, self._merged(tiles))
        return None if self.lengths is None else places

    def _tiles_at(self, places: Tensor, maps: tuple[int, int]) -> _Tiles:
        """The tiles at these places, which are numbers in the order of (map of batch entry, map of head, row
        of tiles)."""
        shape, (rows, keys) = self.shape, self.tile
        first = (places % self.rows * rows).unsqueeze(1)
        entry, head = (places // (self.rows * maps[1])), places // self.rows % maps[1]
        q_len: Any = shape.q_len
        kv_len: Any = shape.kv_len
        columns: Any = self.columns
        if self.lengths is not None:
            q_len, kv_len = (x[entry].unsqueeze(1) for x in self.lengths)
            columns = (kv_len + keys - 1) // keys
        # Rows past the end repeat the last one.
        q = torch.minimum(first + torch.arange(rows), torch.as_tensor(q_len - 1))
        b, h = (self._index(x, n) for x, n in zip((entry, head), maps, strict=True))
        symbols = {"b": b if shape.b is None else shape.b, "h": h, "q": q, "q_len": q_len, "kv_len": kv_len}
        values = evaluate(self.ends, symbols | {"num_heads": shape.heads}, self.captured)
        end = torch.as_tensor(kv_len)
        clipped = [torch.as_tensor(x).clamp(min=0).minimum(end).to(torch.int32).expand_as(q) for x in values]
        if not clipped:
            return _Tiles(*(end.to(torch.int32).expand_as(q)[None],) * 2, columns, kv_len)
        lo, hi = torch.stack(clipped[::2]), torch.stack(clipped[1::2])
        if int((hi - lo).amin()) <= 0:
            empty, past = lo >= hi, end.to(torch.int32)
            lo, hi = torch.where(empty, past, lo), torch.where(empty, past, hi)
        return _Tiles(lo, hi, columns, kv_len)

    def _index(self, of_tile: Tensor, count: int) -> Any:
        """A symbol's value: a number where all tiles have the same."""
        return int(of_tile[0]) if self.singly or count == 1 else of_tile.unsqueeze(1)

    def _append_hulls(self, builder: RunBuilder, tiles: _Tiles) -> bool:
        """One span per row: tiles touched by some row, then tiles inside the spans of all rows, are ranges.

        False, and nothing appended, if the rows of some tile leave a gap between the tiles they touch.
        """
        lo, hi = tiles.lo[0], tiles.hi[0]
        if not self._in_touch(lo, hi) and self._gaps(tiles):
            return False
        # Tiles follow from keys by functions that rise: those of extremes are extremes.
        used_hi = hi if int((hi - lo).amin()) > 0 else torch.where(lo < hi, hi, 0)
        begin, end, _, _ = self._touched(lo.amin(1, keepdim=True), used_hi.amax(1, keepdim=True), tiles)
        _, _, inner_begin, inner_end = self._touched(
            lo.amax(1, keepdim=True), hi.amin(1, keepdim=True), tiles
        )
        end = torch.maximum(begin, end)  # where no row has a key, begin lies past the last tile
        solid = inner_begin < inner_end  # an empty row lies past the last key: its inner_begin past all tiles
        inner_begin, inner_end = torch.where(solid, inner_begin, end), torch.where(solid, inner_end, end)
        builder.append_ranges(torch.cat((begin, inner_begin, inner_end, end), 1))
        return True

    @staticmethod
    def _in_touch(lo: Tensor, hi: Tensor) -> bool:
        """True if each row's keys overlap those of the next in its tile, or end where these begin."""
        if lo.shape[1] < 2:
            return True
        return int((lo[:, 1:] - hi[:, :-1]).amax()) <= 0 and int((lo[:, :-1] - hi[:, 1:]).amax()) <= 0

    def _gaps(self, tiles: _Tiles) -> bool:
        """True if the rows of some tile leave a gap between the tiles they touch."""
        used = tiles.hi[0] > tiles.lo[0]
        begin, end, _, _ = self._touched(tiles.lo[0], tiles.hi[0], tiles)
        begin = begin.masked_fill(~used, self.columns + 1)  # beyond every gap
        order = begin.argsort(1)
        reach = end.masked_fill(~used, 0).gather(1, order).cummax(1).values[:, :-1]
        following = begin.gather(1, order)[:, 1:]
        return bool(((following > reach) & (following <= self.columns)).any())

    def _touched(self, lo: Tensor, hi: Tensor, tiles: _Tiles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First and last tile (exclusive) that a span touches, and that lie inside it."""
        keys = self.tile[1]
        # The last tile may be ragged: it ends where the keys end.
        inner_end = torch.where(hi == tiles.kv_len, tiles.columns, hi // keys)
        return lo // keys, (hi + keys - 1) // keys, (lo + keys - 1) // keys, inner_end

    def _append_counted(self, builder: RunBuilder, tiles: _Tiles) -> None:
        """Any disjoint spans: count for each tile the rows that touch it, and that fill it."""
        step = max(AT_ONCE // max(self.columns, 1), 1)
        begin, end, inner_begin, inner_end = self._touched(tiles.lo, tiles.hi, tiles)
        used = tiles.hi > tiles.lo
        filling = used & (inner_end > inner_begin)
        for part in torch.arange(tiles.lo.shape[1]).split(step):
            at = slice(int(part[0]), int(part[-1]) + 1)
            touched = self._covered(begin[:, at], end[:, at], used[:, at])
            inside = self._covered(inner_begin[:, at], inner_end[:, at], filling[:, at])
            builder.append((touched > 0).to(torch.uint8) + (inside == self.tile[0]).to(torch.uint8))

    def _covered(self, start: Tensor, stop: Tensor, valid: Tensor) -> Tensor:
        """Number of spans that cover each tile, int32 [rows of tiles, columns]; start .. stop - 1 each."""
        tiles = start.shape[1]
        steps = torch.zeros(tiles * (self.columns + 1), dtype=torch.int32)
        base = (torch.arange(tiles) * (self.columns + 1)).view(1, -1, 1)
        weight = valid.to(torch.int32).flatten()
        steps.index_add_(0, (base + start).flatten(), weight)
        steps.index_add_(0, (base + stop).flatten(), -weight)
        return steps.reshape(tiles, self.columns + 1).cumsum(1, dtype=torch.int32)[:, :-1]

    def _merged(self, tiles: _Tiles) -> _Tiles:
        """The same keys as spans that do not touch: only then is a full tile inside a single span."""
        lo, hi = tiles.lo, tiles.hi
        if len(lo) == 1:
            return tiles
        past = torch.as_tensor(tiles.kv_len)
        lo, order = lo.sort(0)
        reach = hi.gather(0, order).cummax(0).values
        begins = torch.ones_like(lo, dtype=torch.bool)
        begins[1:] = lo[1:] > reach[:-1]
        end = reach.clone()
        for i in range(len(lo) - 2, -1, -1):
            end[i] = torch.where(begins[i + 1], reach[i], end[i + 1])
        return _Tiles(torch.where(begins, lo, past), torch.where(begins, end, past), tiles.columns, past)
