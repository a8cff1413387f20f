"""A block's tile: queries that share a list, of heads that share keys; and the keys that it visits.

Keys are numbered by the list: those of its entries, one unit after the other, in tiles of their own; then,
where queries see keys beside their lists, those of the sinks, and those from the first one that the tile's
first query sees to its last query's own. A key that is listed, and that a query sees besides, counts in the
second kind of tile alone.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.even_batches import splits_of
from fa4flex.kernels.common.key_lengths import lengths_of
from fa4flex.kernels.common.keys import NEVER
from fa4flex.kernels.common.packed_rows import Row, run_of
from fa4flex.kernels.common.work import Work, packed_tile
from fa4flex.kernels.lists.config import ListsConfig


class Groups(NamedTuple):
    """Query heads in groups that share a list and a KV head: `count` of them, of `size` heads each. Tiles
    have up to `heads` of a group, in `pieces` of it, for up to `tokens` queries of a row of the lists, in
    `parts` of it; or of several rows, which then count as one."""

    count: Int32
    size: Int32
    heads: Int32
    pieces: Int32
    tokens: Int32
    parts: Int32


def group_count(arguments: Arguments) -> Int32:
    """The number of heads of lists divides that of keys, or is divided by it."""
    return cutlass.max(Int32(kv_heads(arguments)), Int32(arguments.ids.shape[1]))


def queries_of(arguments: Arguments, config: ListsConfig) -> Int32:
    """Queries of the rows of the lists that a tile has."""
    return Int32(arguments.queries) * config.united


def rows_of(arguments: Arguments, config: ListsConfig) -> Int32:
    """Rows of the lists, those of a tile as one."""
    return (Int32(arguments.ids.shape[2]) + (config.united - 1)) // config.united


def groups_of(arguments: Arguments, config: ListsConfig) -> Groups:
    heads, queries, rows = Int32(arguments.q.shape[-2]), queries_of(arguments, config), config.rows
    count = group_count(arguments)
    size = heads // count
    pieces = (size + (rows - 1)) // rows
    most = (size + pieces - 1) // pieces
    tokens = cutlass.min(cutlass.max(rows // most, Int32(1)), queries)
    return Groups(count, size, most, pieces, tokens, (queries + tokens - 1) // tokens)


def sequences_of(arguments: Arguments) -> Int32:
    if arguments.cu_seqlens_q is not None:
        return Int32(arguments.cu_seqlens_q.shape[0] - 1)
    return Int32(arguments.q.shape[0])


def tiles_of_launch(arguments: Arguments, config: ListsConfig) -> Int32:
    """Tiles of all rows of the lists, whether there are queries for them or not."""
    groups, rows = groups_of(arguments, config), rows_of(arguments, config)
    return sequences_of(arguments) * groups.count * rows * groups.parts * groups.pieces


class Part(NamedTuple):
    """A block's part of a launch: number `split` of `splits` of the keys of a tile, or none where it is not
    below `splits`. The tile: `piece` of the heads and `place` of the queries of a group and row of the
    lists."""

    b: Int32
    group: Int32
    row: Int32
    place: Int32
    piece: Int32
    split: Int32
    splits: Int32


def part_of(number: Int32, arguments: Arguments, config: ListsConfig) -> Part:
    """Part of block `number`: the first splits of all tiles come before any second one. Tiles of a KV head
    follow each other, which find its keys in L2."""
    groups, rows = groups_of(arguments, config), rows_of(arguments, config)
    split, splits, tile = Int32(0), Int32(1), number
    if config.splits:
        tiles = tiles_of_launch(arguments, config)
        split, splits, tile = number // tiles, splits_of(arguments), number % tiles
    piece, tile = tile % groups.pieces, tile // groups.pieces
    place, tile = tile % groups.parts, tile // groups.parts
    row, tile = tile % rows, tile // rows
    return Part(tile // groups.count, tile % groups.count, row, place, piece, split, splits)


class ListTile(NamedTuple):
    """Queries from `first_q` on, `tokens` of them, of `group` heads from `first_head` on; heads from
    `end_head` on are not of the tile. offsets: of the sequence's queries and keys in packed tensors.
    first, last: of its tiles of keys, see Walk. Otherwise a Tile of common/packed_rows.py."""

    b: Int32
    kv_head: Int32
    first_head: Int32
    end_head: Int32
    group: Int32
    heads: Int32
    first_q: Int32
    tokens: Int32
    split: Int32
    q_len: Int32
    kv_len: Int32
    q_offset: Int32
    kv_offset: Int32
    first: Int32
    last: Int32

    @property
    def alone(self) -> Boolean:
        """True if the tile has all keys of its rows."""
        return self.split < 0

    @property
    def rows(self) -> Int32:
        return self.tokens * self.group

    def row(self, number: Int32) -> Row:
        kept = cutlass.max(cutlass.min(number, self.rows - 1), Int32(0))
        h = self.first_head + kept % self.group
        exists = (number < self.rows) & (h < self.end_head)
        return Row(self.first_q + kept // self.group, cutlass.min(h, self.end_head - 1), exists)

    def work(self, h: Int32) -> Work:
        lengths = self.q_offset, self.kv_offset, self.q_len, self.kv_len
        return Work(self.split, h, self.b, *lengths, Boolean(True))


@cute.jit
def tile_of(part: Part, arguments: Arguments, config: cutlass.Constexpr[ListsConfig]) -> ListTile:
    """The tile of a part, of which no key is known; without queries where the sequence has none there."""
    groups, zero = groups_of(arguments, config), Int32(0)
    heads = Int32(arguments.q.shape[-2])
    if const_expr(arguments.cu_seqlens_q is not None):
        work = packed_tile(arguments, zero, zero, part.b, Boolean(True))
        q_len, kv_len, q_offset, kv_offset = work.q_len, work.kv_len, work.q_offset, work.kv_offset
    else:
        (q_len, kv_len), (q_offset, kv_offset) = lengths_of(arguments, part.b), (zero, zero)
    first_head = part.group * groups.size
    queries = queries_of(arguments, config)
    first_q = part.row * queries + part.place * groups.tokens
    left = cutlass.min(queries - part.place * groups.tokens, q_len - first_q)
    return ListTile(
        part.b,
        first_head // (heads // Int32(kv_heads(arguments))),
        first_head + part.piece * groups.heads,
        first_head + groups.size,
        groups.heads,
        heads,
        first_q,
        cutlass.max(cutlass.min(groups.tokens, left), zero),
        select_(part.splits == 1, Int32(-1), part.split),
        q_len,
        kv_len,
        q_offset,
        kv_offset,
        zero,
        zero,
    )


class Slice(NamedTuple):
    """Rows of a tile from number `first` on."""

    tile: ListTile
    first: Int32

    @property
    def rows(self) -> Int32:
        return self.tile.rows - self.first

    def row(self, number: Int32) -> Row:
        return self.tile.row(self.first + number)


class Near(NamedTuple):
    """Keys that a query sees beside its list: those below `sinks`, and from `first` to `last`."""

    sinks: Int32
    first: Int32
    last: Int32

    def has(self, key: Int32) -> Boolean:
        return (key < self.sinks) | ((key >= self.first) & (key <= self.last))


def near(q: Int32, tile: ListTile, arguments: Arguments) -> Near:
    """Those of query q: window and tail end with the key of its own place."""
    position, unit = q + (tile.kv_len - tile.q_len), Int32(arguments.unit)
    window, tail = Int32(arguments.window), Int32(arguments.tail)
    of_window = select_(window > 0, position - window + 1, Int32(NEVER))
    of_tail = select_(tail > 0, ((position + 1) // unit + 1 - tail) * unit, Int32(NEVER))
    return Near(Int32(arguments.first_keys), cutlass.min(of_window, of_tail), position)


def own_of(
    q: Int32, tile: ListTile, arguments: Arguments, config: ListsConfig
) -> tuple[Near | None, Int32 | None]:
    """Keys that query q sees beside its list, None where no query sees any; and the bit of its row of the
    lists, of those of the tile, None where that is the only one."""
    seen = near(q, tile, arguments) if config.beside else None
    own = None
    if config.united > 1:
        own = Int32(1) << ((q - tile.first_q) // Int32(arguments.queries))
    return seen, own


class Walk(NamedTuple):
    """Keys of a tile. entries: of the list, to be looked at; unit: keys of one; end: past the last key that
    may be listed or seen. listed: tiles of listed keys. Of keys beside these, `before` are first ones of the
    sequence, and there are `more` in all, the others from key `start` on. count: tiles of all keys."""

    entries: Int32
    unit: Int32
    end: Int32
    listed: Int32
    before: Int32
    start: Int32
    more: Int32
    count: Int32


def walk_of(entries: Int32, tile: ListTile, arguments: Arguments, config: ListsConfig) -> Walk:
    unit, zero = Int32(arguments.unit), Int32(0)
    end = cutlass.min(tile.kv_len, Int32(arguments.end))
    listed = tiles_for(entries * unit, config)
    if not config.beside:
        return Walk(entries, unit, end, listed, zero, zero, zero, listed)
    first, last = (near(q, tile, arguments) for q in (tile.first_q, tile.first_q + tile.tokens - 1))
    before = cutlass.min(first.sinks, end)
    start = cutlass.max(first.first, before)
    more = before + cutlass.max(cutlass.min(last.last + 1, end) - start, zero)
    return Walk(entries, unit, end, listed, before, start, more, listed + tiles_for(more, config))


def tiles_for(keys: Int32, config: ListsConfig) -> Int32:
    return (keys + (config.tile_n - 1)) // config.tile_n


def with_run(tile: ListTile, walk: Walk, part: Part, config: ListsConfig) -> ListTile:
    """The tile with its part of the tiles of keys."""
    first, last = run_of(walk.count, part.split, part.splits, config.share)
    return tile._replace(first=first, last=last)
