"""TileMap: which tiles of a mask are empty, partial or full, as runs of equal tiles per row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape

EMPTY, PARTIAL, FULL = 0, 1, 2
TILES_AT_ONCE = 1 << 20
"""Tiles of whole maps that are turned round in one step."""


@dataclass(frozen=True)
class Proof:
    """Number of tiles that each method decided, and reasons why no better one did."""

    by_intervals: int = 0
    by_bounds: int = 0
    by_witness: int = 0
    by_evaluation: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TileMap:
    """Tiles of a (q, kv) grid by class. Row r of map (b, h) holds runs row_ptr[i] .. row_ptr[i + 1], with
    i = (b * map_heads + h) * rows + r: tiles start .. stop - 1 along the other dimension are all `full`, or
    all partial. Tiles in no run are empty.

    row_ptr  int32 [map_batch * map_heads * rows + 1];  start, stop  int32 [runs];  full  bool [runs]
    map_batch, map_heads are 1 where the mask does not depend on b, on h.
    axis     "q": a row is a tile of queries and runs are over keys; "kv": the other way round.
    lengths  of a ragged batch, int64 [map_batch] of queries and of keys: `shape` has the longest, and tiles
             past the ends of a sequence are empty.
    """

    shape: Shape
    tile: tuple[int, int]
    map_batch: int
    map_heads: int
    row_ptr: Tensor
    start: Tensor
    stop: Tensor
    full: Tensor
    proof: Proof = Proof()
    axis: Literal["q", "kv"] = "q"
    lengths: tuple[Tensor, Tensor] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of tiles along (q, kv)."""
        return -(-self.shape.q_len // self.tile[0]), -(-self.shape.kv_len // self.tile[1])

    @property
    def rows(self) -> int:
        return self.grid[0 if self.axis == "q" else 1]

    @property
    def columns(self) -> int:
        return self.grid[1 if self.axis == "q" else 0]

    def runs(self, b: int, h: int, row: int) -> list[tuple[int, int, bool]]:
        """(start, stop, full) of each run of `row`, in order."""
        i = (min(b, self.map_batch - 1) * self.map_heads + min(h, self.map_heads - 1)) * self.rows + row
        first, last = self.row_ptr[i : i + 2].tolist()
        columns = (self.start, self.stop, self.full)
        return list(zip(*(x[first:last].tolist() for x in columns), strict=True))

    def counts(self) -> tuple[int, int, int]:
        """Numbers of empty, partial and full tiles over all maps."""
        length = self.stop - self.start
        full = int(length[self.full].sum())
        partial = int(length.sum()) - full
        return self.map_batch * self.map_heads * self.rows * self.columns - partial - full, partial, full

    @property
    def density(self) -> float:
        """Share of tiles that are not empty."""
        empty, partial, full = self.counts()
        return (partial + full) / max(empty + partial + full, 1)

    @property
    def used_columns(self) -> float:
        """Share of columns, over all maps, with a tile that is not empty."""
        maps = self.map_batch * self.map_heads
        of_run = torch.repeat_interleave(
            torch.arange(maps * self.rows) // self.rows, self.row_ptr.diff().long()
        )
        steps = torch.zeros(maps, self.columns + 1, dtype=torch.int64)
        for ends, step in ((self.start, 1), (self.stop, -1)):
            steps.index_put_((of_run, ends.long()), torch.tensor(step), accumulate=True)
        return float((steps.cumsum(1)[:, :-1] > 0).double().mean())

    def classes(self) -> Tensor:
        """uint8 [map_batch, map_heads, q tiles, kv tiles]: 0 empty, 1 partial, 2 full."""
        dense = self._classes(0, self.map_batch * self.map_heads)
        dense = dense.reshape(self.map_batch, self.map_heads, self.rows, self.columns)
        return dense if self.axis == "q" else dense.transpose(2, 3)

    def transposed(self) -> TileMap:
        """The same tiles by the other axis: for each kv tile, runs of q tiles, as in a backward pass."""
        builder, maps = RunBuilder(), self.map_batch * self.map_heads
        together = max(TILES_AT_ONCE // (self.rows * self.columns + 1), 1)
        for i in range(0, maps, together):
            turned = self._classes(i, min(i + together, maps)).transpose(1, 2)
            builder.append(turned.flatten(0, 1))
        return replace(self, **builder.finish(self.start.device), axis="kv" if self.axis == "q" else "q")

    def _classes(self, i: int, end: int) -> Tensor:
        """uint8 [maps, rows, columns] of maps i .. end - 1: +class where a run starts, -class where it stops,
        summed up."""
        rows = (end - i) * self.rows
        pointers = self.row_ptr[i * self.rows : end * self.rows + 1].long()
        first, last = int(pointers[0]), int(pointers[-1])
        row = torch.repeat_interleave(
            torch.arange(rows, device=pointers.device), pointers.diff(), output_size=last - first
        )
        value = self.full[first:last].to(torch.int8) + 1
        steps = torch.zeros(rows, self.columns + 1, dtype=torch.int8, device=pointers.device)
        steps.index_put_((row, self.start[first:last].long()), value, accumulate=True)
        steps.index_put_((row, self.stop[first:last].long()), -value, accumulate=True)
        dense = steps.cumsum(1, dtype=torch.int8)[:, :-1].to(torch.uint8)
        return dense.reshape(end - i, self.rows, self.columns)


class RunBuilder:
    """Gathers runs, block of rows after block of rows, in row order."""

    def __init__(self) -> None:
        self._lengths: list[Tensor] = []
        self._runs: list[tuple[Tensor, Tensor, Tensor]] = []

    def append(self, classes: Tensor) -> None:
        """Some rows of classes, uint8 [n, columns]."""
        if classes.shape[1] == 0:
            self._lengths.append(torch.zeros(classes.shape[0], dtype=torch.int64, device=classes.device))
            return
        present = classes != EMPTY
        changes = classes[:, 1:] != classes[:, :-1]
        begins, ends = present.clone(), present
        begins[:, 1:] &= changes
        ends[:, :-1] &= changes
        row, start = begins.nonzero(as_tuple=True)
        stop = ends.nonzero(as_tuple=True)[1] + 1
        full = classes[row, start] == FULL
        self._lengths.append(torch.bincount(row, minlength=classes.shape[0]))
        self._runs.append((start.to(torch.int32), stop.to(torch.int32), full))

    def append_ranges(self, ends: Tensor) -> None:
        """Append n rows, whose ends are [n, 4]: partial from ends[:, 0] to [:, 1], full to [:, 2], partial to
        [:, 3]."""
        start, stop = ends[:, :-1], ends[:, 1:]
        full = torch.tensor([False, True, False], device=start.device).expand_as(start)
        present = start < stop
        self._lengths.append(present.sum(1))
        self._runs.append((start[present].to(torch.int32), stop[present].to(torch.int32), full[present]))

    def finish(
        self, device: torch.device | None = None, places: Tensor | None = None, rows: int = 0
    ) -> dict[str, Any]:
        """row_ptr, start, stop and full of all rows; where `places` are given, those were rows that stand
        there among `rows`, all others of which are empty."""
        lengths = (
            torch.cat(self._lengths) if self._lengths else torch.zeros(0, dtype=torch.int64, device=device)
        )
        if places is not None:
            lengths = torch.zeros(rows, dtype=torch.int64).index_copy(0, places, lengths)
        row_ptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
        row_ptr[1:] = lengths.cumsum(0)
        none = (torch.empty(0, dtype=d, device=device) for d in (torch.int32, torch.int32, torch.bool))
        parts = zip(*self._runs, strict=True) if self._runs else ((x,) for x in none)
        start, stop, full = (torch.cat(part) for part in parts)
        return {"row_ptr": row_ptr, "start": start, "stop": stop, "full": full}
