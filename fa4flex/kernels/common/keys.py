"""Tiles of keys that a tile of queries visits: first those that need the mask, then those that do not. In
backward passes the same of a tile of keys, which visits tiles of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Tables
from fa4flex.kernels.common.hooks import At, Hooks

NEVER = 0x3FFFFFFF

Span = tuple[Int32 | None, Int32]
"""[lo, hi), clipped; None for lo = 0."""


class Ranges(NamedTuple):
    """Up to four runs of tiles one after another: element i is in the first run that is not passed."""

    starts: tuple[Int32, ...]
    counts: tuple[Int32, ...]

    def total(self) -> Int32:
        count = self.counts[0]
        for more in self.counts[1:]:
            count = count + more
        return count

    def at(self, i: Int32) -> Int32:
        tile, passed = self.starts[0] + i, self.counts[0]
        for start, count in zip(self.starts[1:], self.counts[1:], strict=True):
            tile = select_(i < passed, tile, start + (i - passed))
            passed = passed + count
        return tile


class Listed(NamedTuple):
    """A run of a block table."""

    tiles: cute.Tensor
    first: Int32
    count: Int32

    def total(self) -> Int32:
        return self.count

    def at(self, i: Int32) -> Int32:
        return self.tiles[cutlass.max(cutlass.min(self.first + i, Int32(self.tiles.shape[0]) - 1), Int32(0))]


class KeyTiles(NamedTuple):
    """`masked` tiles, then `full` ones. Where every row is written by whoever takes tiles, there is at least
    one in all, masked."""

    masked: Any
    full: Any
    masked_count: Int32
    full_count: Int32

    @property
    def count(self) -> Int32:
        return self.masked_count + self.full_count


def row_spans(hooks: Hooks, at: At) -> list[Span]:
    """The keys of row at.q, each span clipped to [0, kv_len)."""
    return [(None, at.kv_len)] if hooks.spans is None else _clipped(hooks.spans(at), at.kv_len)


class RowEnds(NamedTuple):
    """Ends of key spans as they stand beside block tables. in_order: not 0 where they hold, the same number
    for all rows of a tile."""

    ends: cute.Tensor
    spans: int
    in_order: Int32

    def at(self, at: At) -> list[Span]:
        """The keys of row at.q."""
        found = [self.ends[i, at.b, at.h, at.q] for i in range(2 * self.spans)]
        return list(zip(found[::2], found[1::2], strict=True))


def row_ends(tables: Tables, at: At, spans: int) -> RowEnds | None:
    """The ends of so many spans per row; None without any."""
    if not spans:
        return None
    return RowEnds(tables.row_ends, spans, cute.arch.make_warp_uniform(tables.in_order[at.b, at.h]))


def column_spans(hooks: Hooks, at: At) -> list[Span]:
    """The queries of key at.kv, each span clipped to [0, q_len)."""
    assert hooks.queries is not None
    return _clipped(hooks.queries(at), at.q_len)


def _clipped(spans: Any, length: Int32) -> list[Span]:
    found: list[Span] = []
    for lo, hi in spans:
        high = length if hi is None else cutlass.min(Int32(hi), length)
        found.append((None if lo is None else cutlass.max(Int32(lo), Int32(0)), high))
    return found


class Lines(NamedTuple):
    """Lines that have spans, and number of them: the rows of a tile of queries, which have spans of keys; or
    the keys of a tile, which have spans of queries."""

    spans: Callable[[Int32], list[Span]]
    count: Int32


def _rows(hooks: Hooks, at: At) -> Lines:
    def spans(q: Int32) -> list[Span]:
        return row_spans(hooks, at.but(q=q, q_float=q.to(cutlass.Float32)))

    return Lines(spans, at.q_len)


def _columns(hooks: Hooks, at: At) -> Lines:
    def spans(kv: Int32) -> list[Span]:
        return column_spans(hooks, at.but(kv=kv, kv_float=kv.to(cutlass.Float32)))

    return Lines(spans, at.kv_len)


def _ends(lines: Lines, i: Int32) -> list[list[Int32]]:
    """Ends that line i gives, by span: for the least and latest start, and for the soonest and last end."""
    ends = []
    inside = i < lines.count
    for lo, hi in lines.spans(cutlass.max(cutlass.min(i, lines.count - 1), Int32(0))):
        lo = Int32(0) if lo is None else lo
        some = inside & (lo < hi)
        # A line with an empty span forbids full tiles; one past the end has no say.
        ends.append(
            [
                select_(some, lo, Int32(NEVER)),
                select_(some, lo, select_(inside, Int32(NEVER), Int32(0))),
                select_(some, hi, select_(inside, Int32(0), Int32(NEVER))),
                select_(some, hi, Int32(0)),
            ]
        )
    return ends


def _combined(ends: list[list[Int32]], more: list[list[Int32]]) -> list[list[Int32]]:
    combine = (cutlass.min, cutlass.max, cutlass.min, cutlass.max)
    return [
        [f(x, y) for f, x, y in zip(combine, *spans, strict=True)] for spans in zip(ends, more, strict=True)
    ]


def _keep(kept: cute.Tensor, ends: list[list[Int32]]) -> None:
    for span, mine in enumerate(ends):
        for i, end in enumerate(mine):
            kept[i, span] = end


@cute.jit
def _more_lines(
    lines: cutlass.Constexpr[Lines],
    first: Int32,
    count: cutlass.Constexpr[int],
    kept: cute.Tensor,
) -> None:
    """The ends of all lines but the first 32, in a loop: written out, they take more registers than a single
    warp has beside its own work."""
    for step in cutlass.range(32, count, 32, unroll=1):
        before = [[kept[i, span] for i in range(4)] for span in range(cute.size(kept, mode=[1]))]
        _keep(kept, _combined(before, _ends(lines, first + step + cute.arch.lane_idx())))


def _tile_range(lines: Lines, first: Int32, count: int, size: int, looped: bool) -> list[tuple[Int32, ...]]:
    """Ranges of tiles for `count` lines, per span: tiles of `size` in [a, d) hold what some line sees, tiles
    in [b, c) only what every line does; a <= b <= c <= d.

    Each lane evaluates the spans of some lines, and the warp takes the least and the greatest of their ends.
    """
    ends = _ends(lines, first + cute.arch.lane_idx())
    if looped:
        kept = cute.make_rmem_tensor((4, len(ends)), Int32)
        _keep(kept, ends)
        _more_lines(lines, first, count, kept)
        ends = [[kept[i, span] for i in range(4)] for span in range(len(ends))]
    else:
        for step in range(32, count, 32):
            ends = _combined(ends, _ends(lines, first + step + cute.arch.lane_idx()))
    tiles = []
    for mine in ends:
        kinds = ("min", "max", "min", "max")
        least, latest, soonest, most = (
            cute.arch.warp_redux_sync(x, kind) for x, kind in zip(mine, kinds, strict=True)
        )
        a = select_(least < most, least // size, Int32(0))
        d = select_(least < most, (most + (size - 1)) // size, Int32(0))
        b = cutlass.min(cutlass.max((latest + (size - 1)) // size, a), d)
        c = cutlass.min(cutlass.max(soonest // size, b), d)
        tiles.append((a, b, c, d))
    return tiles


def _disjoint(tiles: list[tuple[Int32, ...]]) -> list[tuple[Int32, ...]]:
    """Two ranges in order and without overlap; what the second shares with the first stays with the first."""
    if len(tiles) == 1:
        return tiles
    first, second = tiles
    swap = second[0] < first[0]
    first, second = (
        tuple(select_(swap, y, x) for x, y in zip(first, second, strict=True)),
        tuple(select_(swap, x, y) for x, y in zip(first, second, strict=True)),
    )
    a, b, c, d = (cutlass.max(x, first[3]) for x in second)
    return [first, (a, b, c, d)]


def spanned(hooks: Hooks, at: At, first_row: Int32, rows: int, tile_n: int, looped: bool = False) -> KeyTiles:
    """Key tiles from the rows' spans, or all tiles where the variant has no mask. `looped`: over rows, in
    fewer registers."""
    if hooks.spans is None:
        return _at_least_one(*_ranges(_all_tiles(at.kv_len, tile_n)))
    if len(hooks.spans(at.but(q=first_row, q_float=first_row.to(cutlass.Float32)))) > 2:
        raise ValueError("a kernel takes at most two spans per row")
    lines = _rows(hooks, at)
    if rows % 32:
        # Lanes past the last row of a tile would have its keys be those of the next one as well.
        lines = lines._replace(count=cutlass.min(lines.count, first_row + rows))
    return _at_least_one(*_ranges(_disjoint(_tile_range(lines, first_row, rows, tile_n, looped))))


def _all_tiles(kv_len: Int32, tile_n: int) -> list[tuple[Int32, ...]]:
    return [(Int32(0), Int32(0), kv_len // tile_n, (kv_len + (tile_n - 1)) // tile_n)]


def seen_by(lines: Lines | None, count: int, kv_len: Int32, tile_n: int) -> KeyTiles:
    """Key tiles that some of `count` lines see, all where there are no lines: perhaps none."""
    tiles = _all_tiles(kv_len, tile_n)
    if lines is not None:
        tiles = _disjoint(_tile_range(lines, Int32(0), count, tile_n, True))
    masked, full = _ranges(tiles)
    return KeyTiles(masked, full, masked.total(), full.total())


def asked_outside(lines: Lines | None, count: int, kv_len: Int32, tile_n: int) -> KeyTiles:
    """All key tiles: those need no mask that `count` lines allow whole, of which their spans are keys."""
    end = (kv_len + (tile_n - 1)) // tile_n
    if lines is None:
        return KeyTiles(Ranges((Int32(0),), (end,)), Ranges((end,), (Int32(0),)), end, Int32(0))
    runs = [(b, c) for _, b, c, _ in _disjoint(_tile_range(lines, Int32(0), count, tile_n, True))]
    starts, ends = (Int32(0), *[c for _, c in runs]), (*[b for b, _ in runs], end)
    masked = Ranges(starts, tuple(hi - lo for lo, hi in zip(starts, ends, strict=True)))
    full = Ranges(tuple(b for b, _ in runs), tuple(c - b for b, c in runs))
    return KeyTiles(masked, full, masked.total(), full.total())


def visited_by(hooks: Hooks, at: At, first_key: Int32, keys: int, tile_m: int) -> tuple[Ranges, Ranges]:
    """Tiles of queries, from the spans of a tile's keys: those that need the mask, and the others."""
    return _ranges(_disjoint(_tile_range(_columns(hooks, at), first_key, keys, tile_m, True)))


def _ranges(tiles: list[tuple[Int32, ...]]) -> tuple[Ranges, Ranges]:
    masked = Ranges(
        tuple(x for a, b, c, d in tiles for x in (a, c)),
        tuple(x for a, b, c, d in tiles for x in (b - a, d - c)),
    )
    return masked, Ranges(tuple(b for a, b, c, d in tiles), tuple(c - b for a, b, c, d in tiles))


def listed(tables: Tables, at: At, row: Int32) -> KeyTiles:
    """Key tiles from block tables."""
    parts = []
    for pointers, tiles in (
        (tables.partial_ptr, tables.partial_tiles),
        (tables.full_ptr, tables.full_tiles),
    ):
        first, last = (pointers[at.b, at.h, row, end] for end in (0, 1))
        parts.append(Listed(tiles, first, last - first))
    return _at_least_one(*parts)


def _at_least_one(masked: Any, full: Any) -> KeyTiles:
    some, more = masked.total(), full.total()
    return KeyTiles(masked, full, select_(some + more == 0, Int32(1), some), more)


@cute.jit
def tile_at(keys: KeyTiles, i: Int32) -> Int32:
    """Tile i of both parts. Full tiles come last to first: scores that grow towards near keys, as those of
    ALiBi do, then raise the maxima at the start only."""
    tile = Int32(0)
    if const_expr(isinstance(keys.masked, Listed)):
        if i < keys.masked_count:
            tile = keys.masked.at(i)
        else:
            tile = keys.full.at(keys.count - 1 - i)
    else:
        tile = select_(i < keys.masked_count, keys.masked.at(i), keys.full.at(keys.count - 1 - i))
    return tile
