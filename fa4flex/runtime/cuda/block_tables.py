"""Block tables of the calls that look alike, made anew whenever what they are made of has changed: on the
device, in one launch; or on the host, which waits, where the device has no kernel for them.

A table is kept for the tensors that it was made of: their objects, memory and versions, and the stream that
made it. While a CUDA graph is captured, a launch makes it within the graph: replays follow new contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.simulated import simulating
from fa4flex.contents import VersionedCache
from fa4flex.runtime.cuda.call import Call
from fa4flex.runtime.cuda.counter import capture_of
from fa4flex.runtime.cuda.device import require_not_capturing
from fa4flex.runtime.cuda.graphs import hold_if_captured
from fa4flex.runtime.cuda.host_tables import BlockTables, TurnTables
from fa4flex.runtime.cuda.prepared import prepared

MOST_KEPT = 16
"""Tables of one launch, of as many sets of tensors: one per layer, say."""

MOST_BYTES = 1 << 29
"""Room for the lists of one mask on the device: each row has room for all of its tiles."""

Tables = BlockTables | TurnTables

PARAMETERS = "call", "ranges", "tables"
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


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Makes tables on the device of a call.

    launch   a function of PARAMETERS
    shape    of the calls
    tile     queries and keys of a tile
    ranges   of the tables of ranges: how many, batch entries, heads and tiles; None without any
    slots    of the captured tensors that the mask reads
    """

    launch: Callable[..., None]
    shape: Shape
    tile: tuple[int, int]
    grid: Grid
    ranges: tuple[int, int, int, int] | None
    slots: tuple[int, ...]
    _kept: VersionedCache[Any] = field(default_factory=lambda: VersionedCache(MOST_KEPT))

    def __call__(self, call: Call) -> Any:
        place = capture_of(call.q)
        if place is None or place[1]:  # within a graph
            return self.make(call)
        read = [call.operands[slot] for slot in self.slots]
        return self._kept.made(place, read, lambda: _reused(self.make(call), call.q))

    def make(self, call: Call) -> BlockTables:
        grid, shape = self.grid, self.shape
        pointers = (grid.batch, grid.heads, grid.rows, 2)
        sizes = [math.prod(pointers)] * 2 + [grid.lists] * 2 + [math.prod(self.ranges or (0,))]
        room = call.q.new_empty(sum(sizes), dtype=torch.int32)
        partial_ptr, full_ptr, partial, full, ranges = room.split(sizes)
        partial_ptr, full_ptr = partial_ptr.view(pointers), full_ptr.view(pointers)
        made = BlockTables(partial_ptr, partial, full_ptr, full)
        self.launch(call, None if self.ranges is None else ranges.view(self.ranges), made)
        whole = (shape.batch, shape.heads, -1, -1)
        return made._replace(partial_ptr=partial_ptr.expand(whole), full_ptr=full_ptr.expand(whole))


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
