"""Tile classes of a mask at any tile size: empty, partial or full, each proved.

Where the mask is a union of key intervals, the intervals of every row decide all tiles exactly in
O(rows + tiles). Otherwise interval arithmetic decides large squares of tiles first and splits those it
cannot decide; single tiles left are tried at a few points, then bounded in parts, and at last evaluated
element by element, a bounded number at a time. Nothing is ever as large as the mask.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import Ragged, Shape, bind, on_host, slots_read
from fa4flex.codegen.analyze.intervals import Intervals, KeyIntervals, key_intervals
from fa4flex.codegen.analyze.overflow import beyond_int64, fits, fitted
from fa4flex.codegen.analyze.rows import IntervalRows, one_thread
from fa4flex.codegen.analyze.squares import classify_squares
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tilemap import Proof, RunBuilder, TileMap
from fa4flex.codegen.evaluate import Captured, PastTheEnd
from fa4flex.codegen.expr import Expr, loads, nodes
from fa4flex.contents import Followed
from fa4flex.exact import exactly
from fa4flex.primitives.schedule import Contents

__all__ = ["Proof", "Shape", "TileMap", "tile_map"]


def tile_map(
    mask: Expr,
    keys: KeyIntervals | None,
    shape: Shape,
    captured: Captured,
    tile: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    contents: Contents = "compared",
) -> TileMap:
    """Classes of all (tile[0] x tile[1]) tiles of `mask` over `shape`; tiles at the ends are clipped.

    `keys` are the mask's key intervals if known (`key_intervals(mask)`); they are used where what they
    assume holds for the captured tables as they are now. `dtype` is that of float arithmetic in the mask.
    `contents` as a schedule has it.
    """
    if slots_read(mask):
        here = captured if contents == "counted" else on_host(captured, mask)
        read = [here.operands[slot] for slot in sorted(slots_read(mask))]
        key = mask, keys, shape, exactly(*captured.scalars), tile, dtype
        return _maps.made(key, read, lambda: _classified(mask, keys, shape, here, tile, dtype), contents)
    # What depends on numbers alone is the same at every layer and for every sequence of these lengths.
    alike = shape if "b" in mask.free else replace(shape, batch=1, b=None)
    numbers = captured.scalars
    return replace(remembered(mask, keys, alike, numbers, exactly(*numbers), tile, dtype), shape=shape)


_maps: Followed[TileMap] = Followed(32, 4)
"""Maps of masks that read captured tensors, by the tensors' contents."""


def _classified(
    mask: Expr,
    keys: KeyIntervals | None,
    shape: Shape,
    captured: Captured,
    tile: tuple[int, int],
    dtype: torch.dtype,
) -> TileMap:
    captured = on_host(captured, mask)
    _refuse_short_tables(mask, shape, captured)
    mask, keys = _fitted(mask, keys, shape, captured)
    problem = bind(mask, shape, captured)
    map_batch = shape.batch if "b" in problem.free else 1
    map_heads = shape.heads if "h" in problem.free else 1
    grid = -(-shape.q_len // tile[0]), -(-shape.kv_len // tile[1])
    builder = RunBuilder()
    tables = Tables(captured)
    with one_thread():
        missing = "no key intervals known" if keys is None else unmet(keys, shape, tables)
    if keys is not None and not missing:
        with one_thread():
            IntervalRows(keys, shape, tile, captured).append_to(builder, (map_batch, map_heads))
        proof = Proof(by_intervals=map_batch * map_heads * grid[0] * grid[1])
    else:
        known = beyond_int64(problem, shape, tables)
        squares = classify_squares(problem, (map_batch, map_heads), shape, tile, tables, known, dtype)
        builder.append(squares.classes.flatten(0, 1))
        proof = squares.proof(missing)
    return TileMap(shape, tile, map_batch, map_heads, **builder.finish(), proof=proof)


@lru_cache(maxsize=256)
def remembered(
    mask: Expr,
    keys: KeyIntervals | None,
    shape: Shape,
    numbers: tuple[bool | int | float, ...],
    exact: str,
    tile: tuple[int, int],
    dtype: torch.dtype,
) -> TileMap:
    """Tiles of masks that read lengths and numbers only: the contents of captured tensors may change between
    calls. `exact` tells numbers apart that compare equal: 0.0 from -0.0."""
    return _classified(mask, keys, shape, Captured((), numbers), tile, dtype)


def ragged_tile_map(
    mask: Expr,
    keys: KeyIntervals | None,
    heads: int,
    captured: Captured,
    tile: tuple[int, int],
    lengths: tuple[Tensor, Tensor],
) -> TileMap | None:
    """One map with an entry per sequence of a ragged batch, `lengths` being those of queries and of keys,
    int64 [batch]; None where the key intervals are not known to hold for all of its sequences."""
    if keys is None or not len(lengths[0]):
        return None
    shape = Ragged(len(lengths[0]), heads, *(int(x.max()) for x in lengths))
    captured = on_host(captured, mask)
    _refuse_short_tables(mask, shape, captured)
    with one_thread():
        mask, keys = _fitted(mask, keys, shape, captured)
        if keys is None or unmet(keys, shape, Tables(captured)):
            return None
        builder, maps = RunBuilder(), (shape.batch, heads if "h" in mask.free else 1)
        rows = maps[0] * maps[1] * -(-shape.q_len // tile[0])
        places = IntervalRows(keys, shape, tile, captured, lengths).append_to(builder, maps)
        proof = Proof(by_intervals=rows * -(-shape.kv_len // tile[1]))
        return TileMap(shape, tile, *maps, **builder.finish(None, places, rows), proof=proof, lengths=lengths)


def _fitted(
    mask: Expr, keys: KeyIntervals | None, shape: Shape, captured: Captured
) -> tuple[Expr, KeyIntervals | None]:
    """A mask whose integers fit in 64 bits over this problem, and its key intervals. Raises TooLarge."""
    (result,) = fitted([mask], shape, captured)
    return result, keys if result is mask else key_intervals(result)


def _refuse_short_tables(mask: Expr, shape: Shape, captured: Captured) -> None:
    """Raise where an index runs past its table: a tile proved by the table's extremes would not notice."""
    ranges = shape.ranges()
    for node in loads(mask):
        table = captured.operands[node.value]
        for index, size in zip(node.args, table.shape, strict=True):
            last = ranges[index.value].hi if index.op == "sym" and index.value in ranges else 0
            if last >= max(size, 1):
                raise PastTheEnd(table, f"{index} goes up to {last} in a dimension of {size}", node)


def unmet(keys: Intervals, shape: Shape, tables: Tables, order: bool = True) -> str:
    """Assumption of the intervals that this problem does not meet, in words; "" if there is none. order:
    whether contents are asked if they are sorted."""
    if not fits([end for span in keys.spans for end in span], shape, tables.captured):
        return "the ends of the intervals may not fit in 64 bits"
    for slot in sorted(keys.sorted_operands):
        if order and not tables.is_sorted(slot):
            return f"t{slot} is not sorted"
    for x in keys.nonnegative:
        bound = bind(x, shape, tables.captured)
        if bounds([bound], shape.ranges(), tables)[0].lo < 0:
            return f"{x} may be negative"
    for node in nodes(*(end for span in keys.spans for end in span)):
        if node.op == "search" and any("q" in lead.free for lead in node.args[1:]):
            return f"{node} searches another table row for each query"
    return ""
