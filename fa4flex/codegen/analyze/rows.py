"""Tile classes from key intervals: each row's spans, evaluated exactly, then counted per tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.intervals import KeyIntervals
from fa4flex.codegen.analyze.tilemap import RunBuilder
from fa4flex.codegen.evaluate import Captured, evaluate

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


class IntervalRows:
    """Classifies rows of tiles of one mask whose key intervals are known to hold: all tiles, exactly."""

    def __init__(self, keys: KeyIntervals, shape: Shape, tile: tuple[int, int], captured: Captured) -> None:
        self.shape, self.tile = shape, tile
        self.columns = -(-shape.kv_len // tile[1])
        self.ends = [end for span in keys.spans for end in span]
        # Needles are int64; searching needs tables of the same type.
        operands = enumerate(captured.operands)
        wide = tuple(x.long() if slot in keys.sorted_operands else x for slot, x in operands)
        self.captured = Captured(wide, captured.scalars)

    def append_to(self, builder: RunBuilder, b: int, h: int) -> None:
        """Append the runs of all rows of tiles of batch entry b and head h."""
        rows = -(-self.shape.q_len // self.tile[0])
        step = max(AT_ONCE // self.tile[0], 1)
        for first in range(0, rows, step):
            stop = min(first + step, rows)
            q = torch.arange(first * self.tile[0], min(stop * self.tile[0], self.shape.q_len))
            lo, hi = self._spans(b, h, q)
            if len(lo) > 1 or not self._append_hulls(builder, lo[0], hi[0]):
                self._append_counted(builder, *self._merged(lo, hi))

    def _append_hulls(self, builder: RunBuilder, lo: Tensor, hi: Tensor) -> bool:
        """One span per row: tiles touched by some row, then tiles inside the spans of all rows, are ranges.

        False, and nothing appended, if the rows of some tile leave a gap between the tiles they touch.
        """
        ragged = -len(lo) % self.tile[0]
        lo, hi = (torch.cat((x, x[-1:].expand(ragged))).reshape(-1, self.tile[0]) for x in (lo, hi))
        used = hi > lo
        begin, end, inner_begin, inner_end = self._tiles(lo, hi)
        begin = begin.masked_fill(~used, self.columns)  # beyond every gap
        end = end.masked_fill(~used, 0)
        if not bool((begin[:, 1:] <= end[:, :-1]).all() & (begin[:, :-1] <= end[:, 1:]).all()):
            order = begin.argsort(1)
            reach = end.gather(1, order).cummax(1).values[:, :-1]
            following = begin.gather(1, order)[:, 1:]
            if bool(((following > reach) & (following < self.columns)).any()):
                return False
        begin, end = begin.amin(1), end.amax(1)
        inner_begin, inner_end = inner_begin.amax(1), inner_end.amin(1)
        solid = (
            inner_begin < inner_end
        )  # an empty row lies past the last key, so inner_begin is past all tiles
        inner_begin, inner_end = torch.where(solid, inner_begin, end), torch.where(solid, inner_end, end)
        builder.append_ranges((begin, inner_begin, inner_end, end))
        return True

    def _tiles(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First and last tile (exclusive) that a span touches, and that lie inside it."""
        keys = self.tile[1]
        # The last tile may be ragged: it ends where the keys end.
        inner_end = torch.where(hi == self.shape.kv_len, self.columns, hi // keys)
        return lo // keys, (hi + keys - 1) // keys, (lo + keys - 1) // keys, inner_end

    def _append_counted(self, builder: RunBuilder, lo: Tensor, hi: Tensor) -> None:
        """Any disjoint spans, [spans, rows]: count for each tile the rows that touch it, and that fill it."""
        step = max(AT_ONCE // max(self.columns, 1), 1) * self.tile[0]
        for low, high in zip(lo.split(step, 1), hi.split(step, 1), strict=True):
            row = torch.arange(low.shape[1]) // self.tile[0]
            rows_in_tile = row.bincount().unsqueeze(1)
            row, used = row.expand_as(low), high > low
            begin, end, inner_begin, inner_end = self._tiles(low, high)
            touched = self._covered(row, begin, end, used, len(rows_in_tile))
            inside = self._covered(
                row, inner_begin, inner_end, used & (inner_end > inner_begin), len(rows_in_tile)
            )
            builder.append((touched > 0).to(torch.uint8) + (inside == rows_in_tile).to(torch.uint8))

    def _spans(self, b: int, h: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Ends of each row's spans, [spans, rows], clipped to the keys; empty spans lie past the last."""
        shape = self.shape
        symbols: dict[str, Tensor | int] = {"b": b if shape.b is None else shape.b, "h": h, "q": q}
        symbols |= {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}
        values = evaluate(self.ends, symbols, self.captured)
        clipped = [torch.as_tensor(x).clamp(0, shape.kv_len).expand_as(q) for x in values]
        if not clipped:
            return (torch.full((1, len(q)), shape.kv_len),) * 2
        lo, hi = torch.stack(clipped[::2]), torch.stack(clipped[1::2])
        empty = lo >= hi
        return lo.masked_fill(empty, shape.kv_len), hi.masked_fill(empty, shape.kv_len)

    def _merged(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The same keys as spans that do not touch: only then is a full tile inside a single span."""
        if len(lo) == 1:
            return lo, hi
        lo, order = lo.sort(0)
        reach = hi.gather(0, order).cummax(0).values
        begins = torch.ones_like(lo, dtype=torch.bool)
        begins[1:] = lo[1:] > reach[:-1]
        end = reach.clone()
        for i in range(len(lo) - 2, -1, -1):
            end[i] = torch.where(begins[i + 1], reach[i], end[i + 1])
        return torch.where(begins, lo, self.shape.kv_len), torch.where(begins, end, self.shape.kv_len)

    def _covered(self, row: Tensor, start: Tensor, stop: Tensor, valid: Tensor, rows: int) -> Tensor:
        """How many spans cover each tile, int32 [rows, columns]; span i covers tiles start .. stop - 1."""
        steps = torch.zeros(rows * (self.columns + 1), dtype=torch.int32)
        base = row * (self.columns + 1)
        weight = valid.to(torch.int32).flatten()
        steps.index_add_(0, (base + start).flatten(), weight)
        steps.index_add_(0, (base + stop).flatten(), -weight)
        return steps.reshape(rows, self.columns + 1).cumsum(1, dtype=torch.int32)[:, :-1]
