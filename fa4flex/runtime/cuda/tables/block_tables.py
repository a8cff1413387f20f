"""Block tables of the calls that look alike, made anew whenever what they are made of has changed: on the
device, in one launch; or on the host, which waits, where the device has no kernel for them.

A table is kept for the tensors that it was made of: their objects, memory and versions, and the stream that
made it. While a CUDA graph is captured, a launch makes it within the graph: replays follow new contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.simulated import simulating
from fa4flex.contents import VersionedCache
from fa4flex.runtime.cuda.calls.call import Call
from fa4flex.runtime.cuda.calls.prepared import prepared
from fa4flex.runtime.cuda.device.counters import capture_of
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.device.graphs import hold_if_captured
from fa4flex.runtime.cuda.tables.host_tables import BlockTables, TurnTables

MOST_KEPT = 16
"""Tables of one launch, of as many sets of tensors: one per layer, say."""

MOST_BYTES = 1 << 29
"""Room for the lists of one mask on the device: each row has room for all of its tiles."""

Tables = BlockTables | TurnTables

PARAMETERS = "call", "ranges", "pieces", "tables"
"""Parameters of a launch function of DeviceTables."""


@dataclass(frozen=True)
class Grid:
    """Rows and columns of tiles, and for how many batch entries and heads they differ."""

    rows: int
    columns: int
    batch: int
    heads: int

    @property
    def lists(self) -> int:
        """Elements of the lists of one class of tiles."""
        return self.batch * self.heads * self.rows * self.columns

    @property
    def fits(self) -> bool:
        return 8 * self.lists <= MOST_BYTES


class Ends(NamedTuple):
    """Key spans per row whose ends stand beside tables; how many rows of captured tensors they search, and in
    how many pieces these are compared."""

    spans: int
    searched: int
    pieces: int


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Makes tables on the device of a call.

    launch   a function of PARAMETERS
    shape    of the calls
    tile     queries and keys of a tile
    ranges   of the tables of ranges: how many, batch entries, heads and tiles; None without any
    slots    of the captured tensors that the mask reads
    ends     of rows; None where kernels read none
    """

    launch: Callable[..., None]
    shape: Shape
    tile: tuple[int, int]
    grid: Grid
    ranges: tuple[int, int, int, int] | None
    slots: tuple[int, ...]
    ends: Ends | None = None
    _kept: VersionedCache[Any] = field(default_factory=lambda: VersionedCache(MOST_KEPT))

    def __call__(self, call: Call) -> Any:
        place = capture_of(call.q)
        if place is None or place[1]:  # within a graph
            return self.make(call)
        read = [call.operands[slot] for slot in self.slots]
        return self._kept.made(place, read, lambda: _reused(self.make(call), call.q))

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the fields of BlockTables, of pieces and of ranges; (0,) for those that there are not."""
        grid, maps = self.grid, (self.grid.batch, self.grid.heads)
        lists = (*maps, grid.rows, 2), (grid.lists,)
        of_rows: tuple[tuple[int, ...], ...] = ((0,),) * 3
        if self.ends is not None:
            spans, searched, pieces = self.ends
            of_rows = (2 * spans, *maps, self.shape.q_len), maps, (searched, *maps, pieces)
        return *lists, *lists, *of_rows, self.ranges or (0,)

    @cached_property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self._shapes]

    def make(self, call: Call) -> BlockTables:
        sizes, whole = self._sizes, (self.shape.batch, self.shape.heads)
        parts = call.q.new_empty(sum(sizes), dtype=torch.int32).split(sizes)
        found = [x.view(shape) if len(shape) > 1 else x for x, shape in zip(parts, self._shapes, strict=True)]
        partial_ptr, partial, full_ptr, full, row_ends, in_order, pieces, ranges = found
        made = BlockTables(partial_ptr, partial, full_ptr, full)
        if self.ends is not None:
            made = BlockTables(partial_ptr, partial, full_ptr, full, row_ends, in_order)
        self.launch(
            call, None if self.ranges is None else ranges, None if self.ends is None else pieces, made
        )
        partial_ptr, full_ptr = (x.expand(*whole, -1, -1) for x in (partial_ptr, full_ptr))
        if self.ends is None:
            return BlockTables(partial_ptr, partial, full_ptr, full)
        row_ends, in_order = row_ends.expand(-1, *whole, -1), in_order.expand(whole)
        return BlockTables(partial_ptr, partial, full_ptr, full, row_ends, in_order)


@dataclass(frozen=True, eq=False)
class HostTables:
    """Makes tables on the host, of the captured tensors in `slots` and of lengths."""

    make: Callable[[Call], Tables]
    slots: tuple[int, ...]
    _kept: VersionedCache[Tables] = field(default_factory=lambda: VersionedCache(MOST_KEPT))

    def __call__(self, call: Call) -> Tables:
        read = [call.operands[slot] for slot in self.slots]
        read += [x for x in call.lengths if x is not None]
        found = self._kept.get(None, read)
        if found is None:
            require_not_capturing()
            found = self._kept.keep(None, read, self.make(call))
        hold_if_captured(call.q.get_device(), found)
        return found


def _reused(tables: BlockTables, q: Tensor) -> Any:
    return tables if simulating() or not q.is_cuda else prepared(tables)
