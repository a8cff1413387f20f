"""TileMap: which tiles of a mask are empty, partial or full, as runs of equal tiles per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Proof:
    """How many tiles were decided by what, and why not by something better."""

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

    def classes(self) -> Tensor:
        """uint8 [map_batch, map_heads, q tiles, kv tiles]: 0 empty, 1 partial, 2 full."""
        maps = self.map_batch * self.map_heads
        dense = (
            torch.stack([self._classes(i) for i in range(maps)])
            if maps
            else torch.empty(0, dtype=torch.uint8)
        )
        dense = dense.reshape(self.map_batch, self.map_heads, self.rows, self.columns)
        return dense if self.axis == "q" else dense.transpose(2, 3)

    def transposed(self) -> TileMap:
        """The same tiles by the other axis: for each kv tile, runs of q tiles, as in a backward pass."""
        builder = RunBuilder(self.columns)
        for i in range(self.map_batch * self.map_heads):
            builder.append(self._classes(i).T.contiguous())
        return replace(self, **builder.finish(self.start.device), axis="kv" if self.axis == "q" else "q")

    def _classes(self, i: int) -> Tensor:
        """uint8 [rows, columns] of one map: +class where a run starts, -class where it stops, summed up."""
        pointers = self.row_ptr[i * self.rows : (i + 1) * self.rows + 1].long()
        first, last = int(pointers[0]), int(pointers[-1])
        row = torch.repeat_interleave(torch.arange(self.rows, device=pointers.device), pointers.diff())
        value = self.full[first:last].to(torch.int8) + 1
        steps = torch.zeros(self.rows, self.columns + 1, dtype=torch.int8, device=pointers.device)
        steps.index_put_((row, self.start[first:last].long()), value, accumulate=True)
        steps.index_put_((row, self.stop[first:last].long()), -value, accumulate=True)
        return steps.cumsum(1, dtype=torch.int8)[:, :-1].to(torch.uint8)


class RunBuilder:
    """Gathers runs, block of rows after block of rows, in row order."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
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

    def append_ranges(self, ends: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """Rows partial from ends[0] to ends[1], full to ends[2], partial to ends[3]; int64 [n] each."""
        start, stop = torch.stack(ends[:-1], 1), torch.stack(ends[1:], 1)
        full = torch.tensor([False, True, False], device=start.device).expand_as(start)
        present = start < stop
        self._lengths.append(present.sum(1))
        self._runs.append((start[present].to(torch.int32), stop[present].to(torch.int32), full[present]))

    def finish(self, device: torch.device | None = None) -> dict[str, Any]:
        """row_ptr, start, stop and full of all rows."""
        lengths = (
            torch.cat(self._lengths) if self._lengths else torch.zeros(0, dtype=torch.int64, device=device)
        )
        row_ptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
        row_ptr[1:] = lengths.cumsum(0)
        none = (torch.empty(0, dtype=d, device=device) for d in (torch.int32, torch.int32, torch.bool))
        parts = zip(*self._runs, strict=True) if self._runs else ((x,) for x in none)
        start, stop, full = (torch.cat(part) for part in parts)
        return {"row_ptr": row_ptr, "start": start, "stop": stop, "full": full}


def maps(map_batch: int, map_heads: int) -> Iterator[tuple[int, int]]:
    """(b, h) of every map, in the order in which their rows are stored."""
    return ((b, h) for b in range(map_batch) for h in range(map_heads))
