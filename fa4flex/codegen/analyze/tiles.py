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

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import READS, Shape, bind, on_host
from fa4flex.codegen.analyze.intervals import Intervals, KeyIntervals
from fa4flex.codegen.analyze.overflow import beyond_int64
from fa4flex.codegen.analyze.rows import IntervalRows, one_thread
from fa4flex.codegen.analyze.squares import classify_squares
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tilemap import Proof, RunBuilder, TileMap, maps
from fa4flex.codegen.evaluate import Captured, PastTheEnd
from fa4flex.codegen.expr import Expr, loads, walk

__all__ = ["Proof", "Shape", "TileMap", "tile_map"]


def tile_map(
    mask: Expr,
    keys: KeyIntervals | None,
    shape: Shape,
    captured: Captured,
    tile: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> TileMap:
    """Classes of all (tile[0] x tile[1]) tiles of `mask` over `shape`; tiles at the ends are clipped.

    `keys` are the mask's key intervals if known (`key_intervals(mask)`); they are used where what they
    assume holds for the captured tables as they are now. `dtype` is that of float arithmetic in the mask.
    """
    if _reads_tensors(mask):
        return _classified(mask, keys, shape, captured, tile, dtype)
    # What depends on numbers alone is the same at every layer and for every sequence of these lengths.
    alike = shape if "b" in mask.free else replace(shape, batch=1, b=None)
    return replace(remembered(mask, keys, alike, Captured((), captured.scalars), tile, dtype), shape=shape)


@lru_cache(maxsize=1024)
def _reads_tensors(mask: Expr) -> bool:
    return any(node.op in READS for node in walk(mask))


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
    problem = bind(mask, shape, captured)
    map_batch = shape.batch if "b" in problem.free else 1
    map_heads = shape.heads if "h" in problem.free else 1
    grid = -(-shape.q_len // tile[0]), -(-shape.kv_len // tile[1])
    builder = RunBuilder(grid[0])
    tables = Tables(captured)
    with one_thread():
        missing = "no key intervals known" if keys is None else unmet(keys, shape, tables)
    if keys is not None and not missing:
        with one_thread():
            rows = IntervalRows(keys, shape, tile, captured)
            for b, h in maps(map_batch, map_heads):
                rows.append_to(builder, b, h)
        proof = Proof(by_intervals=map_batch * map_heads * grid[0] * grid[1])
    else:
        known = beyond_int64(problem, shape, tables)
        squares = classify_squares(problem, (map_batch, map_heads), shape, tile, tables, known, dtype)
        for classes in squares.classes:
            builder.append(classes)
        proof = squares.proof(missing)
    return TileMap(shape, tile, map_batch, map_heads, **builder.finish(), proof=proof)


remembered = lru_cache(maxsize=256)(_classified)
"""Of masks that read lengths and numbers only: the contents of captured tensors may change between calls."""


def _refuse_short_tables(mask: Expr, shape: Shape, captured: Captured) -> None:
    """Raise where an index runs past its table: a tile proved by the table's extremes would not notice."""
    ranges = shape.ranges()
    for node in loads(mask):
        table = captured.operands[node.value]
        for index, size in zip(node.args, table.shape, strict=True):
            last = ranges[index.value].hi if index.op == "sym" and index.value in ranges else 0
            if last >= max(size, 1):
                raise PastTheEnd(table, f"{index} goes up to {last} in a dimension of {size}")


def unmet(keys: Intervals, shape: Shape, tables: Tables) -> str:
    """What the intervals assume and this problem does not provide, in words; "" if nothing."""
    for slot in sorted(keys.sorted_operands):
        if not tables.is_sorted(slot):
            return f"t{slot} is not sorted"
    for x in keys.nonnegative:
        bound = bind(x, shape, tables.captured)
        if bounds([bound], shape.ranges(), tables)[0].lo < 0:
            return f"{x} may be negative"
    for node in walk(*(end for span in keys.spans for end in span)):
        if node.op == "search" and any("q" in lead.free for lead in node.args[1:]):
            return f"{node} searches another table row for each query"
    return ""
