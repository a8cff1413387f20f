"""Block tables of the calls that look alike, made anew whenever what they are made of has changed: on the
device, in one launch; or on the host, which waits, where there is no room for them.

A table is kept for the shape of a call and the tensors that it was made of, captured ones and lengths: their
objects, memory and versions, and the stream that made it. Those of keys in pages are not kept. While a CUDA
graph is captured, a launch makes it within the graph: replays follow new contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.reach import Extents, extents_of
from fa4flex.compiler.simulated import simulating
from fa4flex.contents import VersionedCache
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, NO_PAGES, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.prepared import prepared
from fa4flex.runtime.cuda.device.counters import capture_of
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.device.graphs import hold_if_captured
from fa4flex.runtime.cuda.tables.host_tables import BlockTables, TurnTables

if TYPE_CHECKING:
    from fa4flex.kernels.block_tables.config import Config
    from fa4flex.kernels.block_tables.plan import TablesPlan

MOST_KEPT = 16
"""Tables of one launch, of as many sets of tensors: one per layer, say."""

MOST_BYTES = 1 << 29
"""Room for the lists of one mask on the device: each row has room for all of its tiles."""

MOST_BLOCKS = (1 << 16) - 1
"""Blocks of a launch in each dimension but the first."""

Tables = BlockTables | TurnTables

PARAMETERS = (
    "call", "q_len", "kv_len", "num_heads", "ranges", "pieces", "tables", "turns", *SequenceLengths._fields
)  # fmt: skip
"""Parameters of a launch function of DeviceTables."""


@dataclass(frozen=True)
class Grid:
    """Tables of calls of one shape.

    rows, columns   tiles that a batch entry or sequence has at most: those that list, and those listed
    batch, heads    for how many batch entries or sequences, and heads, they differ
    listing         rows of all of these that have lists
    """

    rows: int
    columns: int
    batch: int
    heads: int
    listing: int

    @property
    def lists(self) -> int:
        """Elements of the lists of one class of tiles. Kernels read one before they know whether it
        counts."""
        return max(self.listing * self.columns, 1)

    @property
    def fits(self) -> bool:
        """True if there is room for lists and pointers of both classes, and a launch may have so many
        blocks."""
        maps = self.batch * self.heads
        room = 8 * self.lists + 16 * maps * self.rows <= MOST_BYTES
        return room and max(self.batch, self.heads) <= MOST_BLOCKS


def grid_of(plan: TablesPlan, shape: Shape) -> Grid:
    """The tables of calls of this shape."""
    (own, listed), (height, width) = (
        x[::-1] if plan.by_keys else x for x in ((shape.q_len, shape.kv_len), plan.tile)
    )
    rows, columns = -(-own // height), max(-(-listed // width), 1)
    batch, heads = (n if varies else 1 for n, varies in zip((shape.batch, shape.heads), plan.varies))
    packed = plan.problem.lengths == "packed"
    # Packed sequences have all tokens between them, and each may end in a tile that is not whole; rows that
    # none has write to one more.
    listing = heads * (own // height + batch) + 1 if packed else batch * heads * rows
    return Grid(rows, columns, batch, heads, listing)


class Layout(NamedTuple):
    """Memory for the tables of calls of one shape: whether there is room for it, how many elements it has,
    and by name what stands where: shape, strides and the first element."""

    fits: bool
    shape: Shape
    size: int
    views: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]


def layout_of(plan: TablesPlan, shape: Shape, pieces: int) -> Layout:
    """Layout of the tables of calls of this shape, whose sorted tensors are compared in so many pieces."""
    grid, config, views, size = grid_of(plan, shape), plan.config(), {}, 0
    for name, sizes in _shapes(grid, config, shape, plan.tile, pieces).items():
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        whole, axis = list(sizes), _MAPPED.get(name)
        if axis is not None:
            for i, n in enumerate((shape.batch, shape.heads), axis):
                strides[i] *= sizes[i] == n
                whole[i] = n
        views[name] = tuple(whole), tuple(strides), size
        size += math.prod(sizes)
    return Layout(grid.fits, shape, size, views)


_MAPPED = {"pointers": 0, "partial_ptr": 0, "full_ptr": 0, "row_ends": 1, "in_order": 0}
"""First of the dimensions of batch entries and heads of what has stride 0 along those that it does not differ
by."""


def _shapes(
    grid: Grid, config: Config, shape: Shape, tile: tuple[int, int], pieces: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the fields of BlockTables, or those of TurnTables and what their ranks are counted from; of
    pieces and of ranges."""
    maps, lists = (grid.batch, grid.heads), (grid.lists,)
    pointers = *maps, grid.rows, 2
    found: dict[str, tuple[int, ...]] = {}
    if config.ordered:
        notes = 2 * grid.listing * -(-grid.columns // 32)
        found |= {"pointers": pointers, "entries": lists, "ranks": lists, "found": (notes,)}
    else:
        found |= {"partial_ptr": pointers, "partial_tiles": lists, "full_ptr": pointers, "full_tiles": lists}
    if config.spans:
        found |= {"row_ends": (2 * config.spans, *maps, shape.q_len), "in_order": maps}
        found["pieces"] = len(config.searched), *maps, pieces
    if config.ranges:
        batch = shape.batch if any(one.by_batch for one in config.ranges) else 1
        heads = shape.heads if any(one.by_heads for one in config.ranges) else 1
        tiles = max(-(-shape.q_len // tile[0]), -(-shape.kv_len // tile[1]))
        found["ranges"] = 2 * len(config.ranges), batch, heads, tiles
    return found


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Makes tables on the device of a call.

    launch   a function of PARAMETERS
    plan     of the kernels
    slots    of the captured tensors that the mask reads
    pieces   in which rows of captured tensors are compared that have to be sorted, if any
    on_host  makes those of shapes for which there is no room
    layouts  of the last few shapes
    """

    launch: Callable[..., None]
    plan: TablesPlan
    slots: tuple[int, ...]
    pieces: int
    on_host: HostTables
    _kept: VersionedCache[Any] = field(default_factory=lambda: VersionedCache(MOST_KEPT))
    layouts: dict[Extents, Layout] = field(default_factory=dict)

    def __call__(self, call: Call, lengths: SequenceLengths = NO_LENGTHS) -> Any:
        """The tables of a call, whose corrected lengths are given."""
        shape = call.extents()
        extents = extents_of(shape)
        layout = self.layouts.get(extents) or self.layout(shape)
        if not layout.fits:
            return self.on_host(call)
        place = capture_of(call.q)
        # Torch counts no change of what a serving engine's own kernels write: lengths of pages.
        if place is None or place[1] or call.pages is not NO_PAGES:
            return self.make(call, layout, lengths)
        read = [call.operands[slot] for slot in self.slots]
        read += [x for x in lengths if x is not None]
        return self._kept.made(
            (place, extents), read, lambda: _reused(self.make(call, layout, lengths), call.q)
        )

    def layout(self, shape: Shape) -> Layout:
        """Layout of the tables of calls of this shape, which is kept."""
        if len(self.layouts) == MOST_KEPT:
            self.layouts.clear()
        found = self.layouts[extents_of(shape)] = layout_of(self.plan, shape, self.pieces)
        return found

    def make(self, call: Call, layout: Layout, lengths: SequenceLengths) -> Tables:
        """The same, made now, for a call of this layout."""
        _, shape, size, views = layout
        memory = call.q.new_empty(size, dtype=torch.int32)
        made = {name: memory.as_strided(*view) for name, view in views.items()}
        ranges, pieces = made.pop("ranges", None), made.pop("pieces", None)
        given = call, shape.q_len, shape.kv_len, shape.heads, ranges, pieces
        if "found" not in made:
            tables = BlockTables(**made)
            self.launch(*given, tables, None, *lengths)
            return tables
        self.launch(*given, None, tuple(made.values()), *lengths)
        del made["found"]
        return TurnTables(**made)


@dataclass(frozen=True, eq=False)
class HostTables:
    """Makes tables on the host, of the captured tensors in `slots` and of lengths."""

    make: Callable[[Call], Tables]
    slots: tuple[int, ...]
    _kept: VersionedCache[Tables] = field(default_factory=lambda: VersionedCache(MOST_KEPT))

    def __call__(self, call: Call) -> Tables:
        """The tables of a call, of its lengths as they were given."""
        read = [call.operands[slot] for slot in self.slots]
        read += [x for x in call.lengths if x is not None]
        key, paged = extents_of(call.extents()), call.pages is not NO_PAGES
        found = None if paged else self._kept.get(key, read)
        if found is None:
            require_not_capturing()
            found = self.make(call) if paged else self._kept.keep(key, read, self.make(call))
        hold_if_captured(call.q.get_device(), found)
        return found


def _reused(tables: Tables, q: Tensor) -> Any:
    """Tables for several launches; turns are made a part of another tuple at each."""
    apart = isinstance(tables, TurnTables) or simulating() or not q.is_cuda
    return tables if apart else prepared(tables)
