"""A block's tile, and its rows: each is a query and a head of the group that shares a KV head."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.even_batches import splits_of
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.key_lengths import lengths_of
from fa4flex.kernels.common.keys import KeyTiles, Lines, Span, asked_outside, row_spans, seen_by
from fa4flex.kernels.common.tile_scheduler import place
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.plan.few_rows import MOST_ROWS


class Row(NamedTuple):
    """A query of head h; the last one where a tile has no such row."""

    q: Int32
    h: Int32
    exists: Boolean


class Slice(NamedTuple):
    """Number of a tile of heads that share a KV head, where their rows are several tiles', and the number of
    such heads."""

    number: Int32
    heads: Int32


class Part(NamedTuple):
    """A block's part of a launch: number `split` of `splits` of the keys of a sequence and KV head, or
    none where it is not below `splits`. slice: which of the heads that share it; None: all."""

    b: Int32
    kv_head: Int32
    split: Int32
    splits: Int32
    slice: Slice | None = None


class Tile(NamedTuple):
    """All queries of `group` heads of sequence b, which share kv_head; and of its key tiles number `first` to
    `last`, in the order of `keys`. split: number of the part, or -1 where it is the only one. slice: which of
    the heads that share kv_head; None: all. The last slice may have fewer of them than others."""

    b: Int32
    kv_head: Int32
    group: Int32
    heads: Int32
    split: Int32
    q_len: Int32
    kv_len: Int32
    keys: KeyTiles
    first: Int32
    last: Int32
    slice: Slice | None = None

    @property
    def alone(self) -> Boolean:
        """True if the tile has all keys of its rows."""
        return self.split < 0

    @property
    def rows(self) -> Int32:
        return self.q_len * self.group

    def row(self, number: Int32) -> Row:
        kept = cutlass.max(cutlass.min(number, self.rows - 1), Int32(0))
        if self.slice is None:
            return Row(kept // self.group, self.kv_head * self.group + kept % self.group, number < self.rows)
        within, heads = self.slice.number * self.group + kept % self.group, self.slice.heads
        h = self.kv_head * heads + cutlass.min(within, heads - 1)
        return Row(kept // self.group, h, (number < self.rows) & (within < heads))

    def work(self, h: Int32) -> Work:
        zero = Int32(0)
        return Work(self.split, h, self.b, zero, zero, self.q_len, self.kv_len, Boolean(True))


def slices_of(arguments: Arguments, rows: int) -> Any:
    """Tiles of up to `rows` rows that the heads which share a KV head are: each has some heads, with all
    queries of the longest sequence."""
    size, heads = slice_heads(arguments, rows), group_heads(arguments)
    return (heads + size - 1) // size


def slice_heads(arguments: Arguments, rows: int) -> Any:
    """Heads of a slice: about as many in each."""
    heads, length = group_heads(arguments), Int32(arguments.q.shape[1])
    most = cutlass.max(rows // cutlass.max(length, Int32(1)), Int32(1))
    slices = (heads + most - 1) // most
    return (heads + slices - 1) // slices


def group_heads(arguments: Arguments) -> Any:
    """Query heads that share a KV head."""
    return Int32(arguments.q.shape[2]) // Int32(kv_heads(arguments))


def part_of(number: Int32, arguments: Arguments, slice_rows: int) -> Part:
    """Part of block `number`: the first splits of all sequences come before any second one, as an even batch
    may have no others; slices follow each other, which share their keys in L2. slice_rows: see Config."""
    heads = Int32(kv_heads(arguments))
    if not slice_rows:
        pairs = Int32(arguments.q.shape[0]) * heads
        pair = number % pairs
        return Part(pair // heads, pair % heads, number // pairs, splits_of(arguments))
    slices = Int32(slices_of(arguments, slice_rows))
    tiles = Int32(arguments.q.shape[0]) * heads * slices
    tile = number % tiles
    one, pair = Slice(tile % slices, group_heads(arguments)), tile // slices
    return Part(pair // heads, pair % heads, number // tiles, splits_of(arguments), one)


@cute.jit
def tile_of(
    part: Part, arguments: Arguments, hooks: cutlass.Constexpr[Hooks], config: cutlass.Constexpr[Any]
) -> Tile:
    """The tile of a part. `config` has tile_n, share and slice_rows."""
    heads, of_keys = Int32(arguments.q.shape[2]), Int32(kv_heads(arguments))
    b, kv_head, split, splits, one = part
    lengths, zero = lengths_of(arguments, b), Int32(0)
    whole = KeyTiles(None, None, zero, zero)
    # One number instead of two: it is kept to the end, beside all else.
    number = select_(splits == 1, Int32(-1), split)
    group = heads // of_keys if const_expr(one is None) else slice_heads(arguments, config.slice_rows)
    tile = Tile(b, kv_head, group, heads, number, *lengths, whole, zero, zero, one)
    keys = keys_of(tile, arguments, hooks, config)
    first, last = run_of(keys.count, split, splits, config.share)
    return tile._replace(keys=keys, first=first, last=last)


def first_full(tile: Tile) -> Int32:
    """Number of the first of its key tiles that needs no mask."""
    return cutlass.max(cutlass.min(tile.keys.masked_count, tile.last), tile.first)


def run_of(count: Int32, split: Int32, splits: Int32, share: int | None) -> tuple[Int32, Int32]:
    """The tiles of a split: `share` of them, or at most one more than another split has."""
    if share is not None:
        return cutlass.min(split * share, count), cutlass.min((split + 1) * share, count)
    each, more = count // splits, count % splits
    first = each * split + cutlass.min(split, more)
    return first, first + each + select_(split < more, Int32(1), Int32(0))


def keys_of(tile: Tile, arguments: Arguments, hooks: Hooks, config: Any) -> KeyTiles:
    """Key tiles that some row sees; all of them where a mask is asked, but of tiles that all rows see."""

    def spans(number: Int32) -> list[Span]:
        row = tile.row(number)
        at = place(hooks, tile.work(row.h), tile.heads, arguments)
        return row_spans(hooks, at.but(q=row.q, q_float=row.q.to(cutlass.Float32)))

    lines = None if hooks.spans is None else Lines(spans, tile.rows)
    visited = seen_by if hooks.mask is None else asked_outside
    return visited(lines, MOST_ROWS, tile.kv_len, config.tile_n)


def place_of(row: Row, tile: Tile, arguments: Arguments, hooks: Hooks) -> At:
    """Hook arguments for a row, with the uniform terms of its head."""
    return place(hooks, tile.work(row.h), tile.heads, arguments)
