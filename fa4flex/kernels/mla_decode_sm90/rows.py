"""A block's tile of rows: queries of some heads, which all have the same keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.even_batches import splits_of
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.key_lengths import lengths_of
from fa4flex.kernels.common.keys import KeyTiles
from fa4flex.kernels.common.packed_rows import Part, Row, keys_of, run_of
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.mla_decode_sm90.config import ROWS


class HeadsTile(NamedTuple):
    """All queries of `group` heads of sequence b, from head `first_head` on; otherwise a Tile of
    common/packed_rows.py. The last tile of a sequence may have fewer heads."""

    b: Int32
    first_head: Int32
    group: Int32
    heads: Int32
    split: Int32
    q_len: Int32
    kv_len: Int32
    keys: KeyTiles
    first: Int32
    last: Int32

    @property
    def alone(self) -> Boolean:
        """True if the tile has all keys of its rows."""
        return self.split < 0

    @property
    def rows(self) -> Int32:
        return self.q_len * self.group

    def row(self, number: Int32) -> Row:
        kept = cutlass.max(cutlass.min(number, self.rows - 1), Int32(0))
        h = self.first_head + kept % self.group
        exists = (number < self.rows) & (h < self.heads)
        return Row(kept // self.group, cutlass.min(h, self.heads - 1), exists)

    def work(self, h: Int32) -> Work:
        zero = Int32(0)
        return Work(self.split, h, self.b, zero, zero, self.q_len, self.kv_len, Boolean(True))


def tiles_of_heads(arguments: Arguments) -> Any:
    """Number of tiles of a sequence: of so many heads that all queries of the longest one are a tile's."""
    _, length, heads, _ = arguments.q.shape
    group = heads_of_tile(length, heads)
    return (Int32(heads) + group - 1) // group


def heads_of_tile(length: Any, heads: Any) -> Any:
    """Heads of a tile: about as many in each."""
    most = cutlass.max(ROWS // Int32(cutlass.max(Int32(length), Int32(1))), Int32(1))
    tiles = (Int32(heads) + most - 1) // most
    return (Int32(heads) + tiles - 1) // tiles


def part_of(number: Int32, arguments: Arguments) -> Part:
    """Part of block `number`: the first splits of all sequences come before any second one, and tiles of a
    sequence follow each other, which share its keys in L2."""
    tiles = Int32(tiles_of_heads(arguments))
    pairs = Int32(arguments.q.shape[0]) * tiles
    pair = number % pairs
    return Part(pair // tiles, pair % tiles, number // pairs, splits_of(arguments))


@cute.jit
def tile_of(
    part: Part, arguments: Arguments, hooks: cutlass.Constexpr[Hooks], config: cutlass.Constexpr[Any]
) -> HeadsTile:
    """The tile of a part."""
    b, number, split, splits = part
    _, length, heads, _ = arguments.q.shape
    group = heads_of_tile(length, heads)
    lengths, zero = lengths_of(arguments, b), Int32(0)
    whole = KeyTiles(None, None, zero, zero)
    of_split = select_(splits == 1, Int32(-1), split)
    tile = HeadsTile(b, number * group, group, Int32(heads), of_split, *lengths, whole, zero, zero)
    keys = keys_of(tile, arguments, hooks, config)  # type: ignore[arg-type]  # it has what a Tile has
    first, last = run_of(keys.count, split, splits, config.share)
    return tile._replace(keys=keys, first=first, last=last)
