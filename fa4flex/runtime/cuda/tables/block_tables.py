"""Block tables of the calls that look alike: on the device, in one launch, wherever contents have changed;
or on the host, which waits, where there is no room for them.

Tables stand in memory that is kept for the shape of a call, the stream, and where the tensors lie that they
are made of, captured ones and lengths. Each call launches what makes them; the device compares a digest of
these tensors with the last one, and stops early where nothing has changed (kernels/block_tables/digest.py).
So changes count that torch does not: by a replayed graph, by another library's kernel, by `.data`. While a
CUDA graph is captured, tables are made within it at each replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.extents import Extents, extents_of
from fa4flex.contents import Alike, Guards, VersionedCache, guards_of, hold
from fa4flex.kernels.block_tables.config import PART
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.calls.looks import memory_key
from fa4flex.runtime.cuda.calls.prepared import prepared
from fa4flex.runtime.cuda.device.counters import capture_of
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.tables.host_tables import BlockTables, TurnTables
from ptxsim.active import simulating

if TYPE_CHECKING:
    from fa4flex.kernels.block_tables.config import Config
    from fa4flex.kernels.block_tables.plan import TablesPlan

MOST_KEPT = 16
"""Tables of one launch, of as many sets of tensors: one per layer, say."""

LAST_TURN = (1 << 31) - 1

MOST_BYTES = 1 << 29
"""Room for the lists of one mask on the device: each row has room for all of its tiles."""

MOST_BLOCKS = (1 << 16) - 1
"""Blocks of a launch in each dimension but the first."""

Tables = BlockTables | TurnTables

PARAMETERS = (
    "call", "q_len", "kv_len", "num_heads", "ranges", "pieces", "tables", "turns", "state", "turn",
    *SequenceLengths._fields,
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
    results: dict[str, tuple[int, ...]] = {}
    if config.ordered:
        notes = 2 * grid.listing * -(-grid.columns // 32)
        results |= {"pointers": pointers, "entries": lists, "ranks": lists, "found": (notes,)}
    else:
        results |= {
            "partial_ptr": pointers,
            "partial_tiles": lists,
            "full_ptr": pointers,
            "full_tiles": lists,
        }
    if config.spans:
        results |= {"row_ends": (2 * config.spans, *maps, shape.q_len), "in_order": maps}
        results["pieces"] = len(config.searched), *maps, pieces
    if config.ranges:
        batch = shape.batch if any(one.by_batch for one in config.ranges) else 1
        heads = shape.heads if any(one.by_heads for one in config.ranges) else 1
        tiles = max(-(-shape.q_len // tile[0]), -(-shape.kv_len // tile[1]))
        results["ranges"] = 2 * len(config.ranges), batch, heads, tiles
    return results


class Arguments(NamedTuple):
    """Arguments of a launch that makes tables, besides a call and its lengths: see BlockTableArguments."""

    q_len: int
    kv_len: int
    num_heads: int
    ranges: Tensor | None
    pieces: Tensor | None
    tables: BlockTables | None
    turns: tuple[Tensor, ...] | None
    state: Tensor


@dataclass(eq=False, slots=True)
class Kept:
    """Tables that launches write anew where contents differ from the last ones. `guards`: of what they were
    made of, where torch's count of changes decides."""

    tables: Any
    arguments: Arguments
    turn: int = 0
    guards: Guards | None = None


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Makes tables on the device of a call.

    launch   a function of PARAMETERS
    plan     of the kernels
    pieces   in which rows of captured tensors are compared that have to be sorted, if any
    on_host  makes those of shapes for which there is no room
    counted  whether torch's count of changes decides if contents are new
    layouts  of the last few shapes
    """

    launch: Callable[..., None]
    plan: TablesPlan
    pieces: int
    on_host: HostTables
    counted: bool = False
    _kept: VersionedCache[Kept] = field(default_factory=lambda: VersionedCache(MOST_KEPT))
    layouts: dict[Extents, Layout] = field(default_factory=dict)

    def __call__(self, call: Call, lengths: SequenceLengths = NO_LENGTHS) -> Any:
        """The tables of a call, whose corrected lengths are given."""
        place, kv, operands = capture_of(call.q), call.kv, call.operands
        if place is None or place[1]:
            return self.make(call, lengths)
        read = [operands[slot] for slot in self.plan.read]
        if lengths is not NO_LENGTHS or kv.seqused_k is not None:
            read += [x for x in (*lengths, kv.seqused_k) if x is not None]
        # Extents follow from these; of pages, from the shape of their table besides.
        shapes = call.q.shape, kv.k.shape if kv.seqused_k is None else call.extents()
        key = place, shapes, *map(memory_key, read)
        known: Kept | None = self._kept.get(key, ())
        if known is None and not self.layout(call.extents()).fits:
            return self.on_host(call)
        if known is not None and not read:  # made of no contents: numbers are those of the launch
            return known.tables
        kept, guards = known or self.room(call, read), None
        if self.counted:
            values = [
                *read[: len(self.plan.read)],
                *(x for x in (*call.lengths, kv.seqused_k) if x is not None),
            ]
            if kept.guards is not None and hold(kept.guards, values):
                return kept.tables
            guards = guards_of(values)
        if read:  # else there is no digest that could differ: they are made in turn 0
            kept.turn = kept.turn % LAST_TURN + 1
        self.launch(call, *kept.arguments, kept.turn, *lengths)
        kept.guards = guards  # after the launch: another thread takes what it finds for made
        if known is None:
            self._kept.keep(key, (), kept)
        return kept.tables

    def layout(self, shape: Shape) -> Layout:
        """Layout of the tables of calls of this shape, which is kept."""
        extents = extents_of(shape)
        known = self.layouts.get(extents)
        if known is None:
            if len(self.layouts) == MOST_KEPT:
                self.layouts.clear()
            known = self.layouts[extents] = layout_of(self.plan, shape, self.pieces)
        return known

    def make(self, call: Call, lengths: SequenceLengths) -> Tables:
        """The tables of a call, made now, in memory of their own where there is room."""
        layout = self.layout(call.extents())
        if not layout.fits:
            return self.on_host(call)
        tables, arguments = self._arguments(call, layout, 1)
        self.launch(call, *arguments, 0, *lengths)
        return tables

    def room(self, call: Call, read: Sequence[Tensor]) -> Kept:
        """Memory for the tables of calls like this one, which are made of `read`."""
        size = 1 + 2 * sum(map(parts_of, read))
        tables, arguments = self._arguments(call, self.layout(call.extents()), size)
        arguments.state.zero_()
        if isinstance(tables, TurnTables) or simulating() or not call.q.is_cuda:
            return Kept(tables, arguments)  # turns are made a part of another tuple at each launch
        ready = prepared(tables)
        return Kept(ready, arguments._replace(tables=ready))

    def _arguments(self, call: Call, layout: Layout, state: int) -> tuple[Tables, Arguments]:
        """New memory for tables, with `state` elements of what is known of their contents behind them."""
        _, shape, size, views = layout
        memory = call.q.new_empty(size + state, dtype=torch.int32)
        made = {name: memory.as_strided(*view) for name, view in views.items()}
        ranges, pieces = made.pop("ranges", None), made.pop("pieces", None)
        sizes, known = (shape.q_len, shape.kv_len, shape.heads), memory[size:]
        if "found" not in made:
            tables = BlockTables(**made)
            return tables, Arguments(*sizes, ranges, pieces, tables, None, known)
        turns = tuple(made.values())
        del made["found"]
        return TurnTables(**made), Arguments(*sizes, ranges, pieces, None, turns, known)


def parts_of(x: Tensor) -> int:
    """Parts of a tensor's contents whose digests are kept."""
    return -(-x.nbytes // (4 * PART))


@dataclass(frozen=True, eq=False)
class HostTables:
    """Makes tables on the host, of the captured tensors in `slots` and of lengths."""

    make: Callable[[Call], Tables]
    slots: tuple[int, ...]
    _kept: Alike[Tables] = field(default_factory=lambda: Alike(MOST_KEPT, 1))

    def __call__(self, call: Call) -> Tables:
        """The tables of a call, of its lengths as they were given."""
        require_not_capturing()
        read = [call.operands[slot] for slot in self.slots]
        read += [x for x in (*call.lengths, call.kv.seqused_k) if x is not None]
        key = capture_of(call.q), extents_of(call.extents())
        return self._kept.made(key, [x.detach().cpu() for x in read], lambda: self.make(call))
