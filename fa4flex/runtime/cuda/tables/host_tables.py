"""Block tables that the host makes: it waits for what they are made of.

A map's runs of tiles are proved on the host, in O(tiles) memory (codegen/analyze/tiles.py), and uploaded as
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import on_host
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.tiles import Shape, TileMap, ragged_tile_map, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.runtime.cuda.tables.upload import upload


class BlockTables(NamedTuple):
    """int32: pointers [B, H, query tiles, 2] with stride 0 along what the mask does not depend on, and the
    tiles that they point into; where kernels read them, ends of the rows' key spans, and whether they hold.
    See Tables in kernels/common/arguments.py."""

    partial_ptr: Tensor
    partial_tiles: Tensor
    full_ptr: Tensor
    full_tiles: Tensor
    row_ends: Tensor | None = None
    in_order: Tensor | None = None


class TurnTables(NamedTuple):
    """int32: pointers [B, H, key tiles, 2], entries and ranks: see Turns in kernels/common/arguments.py."""

    pointers: Tensor
    entries: Tensor
    ranks: Tensor


def ragged_maps(
    facts: Facts, heads: int, captured: Captured, tile: tuple[int, int], lengths: tuple[Tensor, Tensor]
) -> list[TileMap]:
    """One map with an entry per sequence, or a map per sequence; `lengths` of queries and of keys, int64
    [sequences]."""
    together = ragged_tile_map(facts.mask, facts.keys, heads, captured, tile, lengths)
    if together is not None:
        return [together]
    captured, pairs = on_host(captured, facts.mask), zip(*(x.tolist() for x in lengths), strict=True)
    shapes = (Shape(1, heads, q_len, kv_len, b) for b, (q_len, kv_len) in enumerate(pairs))
    return [tile_map(facts.mask, facts.keys, one, captured, tile) for one in shapes]


def to_device(
    maps: Sequence[TileMap], shape: Shape, device: torch.device, least_rows: int = 1
) -> BlockTables:
    """Lists of tiles: of one map for the whole batch of `shape`, or of a map per sequence."""
    parts = (_joined(maps, _listed, full, least_rows=least_rows) for full in (False, True))
    return BlockTables(*_uploaded([x for part in parts for x in part], shape, device))


def turns_to_device(maps: Sequence[TileMap], shape: Shape, device: torch.device) -> TurnTables:
    """Both classes in one list, with ranks, of maps whose rows are tiles of keys."""
    return TurnTables(*_uploaded(_joined(maps, _ordered), shape, device))


def _uploaded(parts: Sequence[Tensor], shape: Shape, device: torch.device) -> list[Tensor]:
    """Pointers, which are the parts with several dimensions, for all of the batch and all heads."""
    there = upload(parts, device)
    return [x.expand(shape.batch, shape.heads, -1, -1) if x.ndim > 1 else x for x in there]


def _joined(
    maps: Sequence[TileMap], make: Callable[..., Any], *arguments: Any, least_rows: int = 1
) -> list[Tensor]:
    """Pointers [maps of batch entries, maps of heads, rows, 2], and the lists that they point into, of all
    that `make` finds of each map: (pointers [.., rows + 1] into its own lists, those)."""
    # Kernels read a row's pointers before they know it exists.
    rows = max(least_rows, *(tiles.rows for tiles in maps))
    pointers, lists, before = [], [], 0
    for tiles in maps:
        own, *result = make(tiles, *arguments)
        pointers.append(_padded(own, rows) + before)
        lists.append(result)
        before += len(result[0])
    # Kernels read an element before they know whether it counts, so there is at least one.
    if before == 0:
        lists.append([torch.zeros(1, dtype=torch.int32) for _ in lists[0]])
    both = torch.cat(pointers).unfold(-1, 2, 1).contiguous()
    return [both, *(torch.cat(x) for x in zip(*lists, strict=True))]


def _listed(tiles: TileMap, full: bool) -> tuple[Tensor, Tensor]:
    """([map_batch, map_heads, rows + 1] pointers into the list, all tiles of a class in row order)."""
    # Kernels do not look at the end of a run's axis in full tiles, so a last tile that passes it is not one.
    last = _whole(tiles, 1 if tiles.axis == "q" else 0, _rows_of_runs(tiles))
    whole = torch.where(tiles.full, tiles.stop.minimum(last), tiles.start)
    windows, _, listed = _expand(tiles, *((tiles.start, whole) if full else (whole, tiles.stop)))
    return windows, listed


def _rows_of_runs(tiles: TileMap) -> Tensor:
    rows = tiles.row_ptr.diff()
    return torch.arange(len(rows)).repeat_interleave(rows, output_size=len(tiles.start))


def _whole(tiles: TileMap, axis: int, row: Tensor) -> Tensor:
    """Number of whole tiles along the queries, 0, or the keys, 1, in the sequences of rows."""
    if tiles.lengths is None:
        length = tiles.shape.kv_len if axis else tiles.shape.q_len
        return torch.tensor(length // tiles.tile[axis], dtype=torch.int32)
    entry = row // max(tiles.map_heads * tiles.rows, 1)
    return (tiles.lengths[axis] // tiles.tile[axis])[entry].to(torch.int32)


def _ordered(tiles: TileMap) -> tuple[Tensor, Tensor, Tensor]:
    """(pointers, entries, ranks): a map's rows, tiles of keys, add to tiles of queries last row first."""
    windows, run, listed = _expand(tiles, tiles.start, tiles.stop)
    place = _rows_of_runs(tiles)[run]
    map, row = place // max(tiles.rows, 1), place % max(tiles.rows, 1)
    partial = ~tiles.full[run] | (listed >= _whole(tiles, 0, place)) | (row >= _whole(tiles, 1, place))
    place = map * tiles.columns + listed
    order = (place * tiles.rows - row).argsort()
    in_order = place[order]
    ranks = torch.empty_like(listed)
    ranks[order] = (torch.arange(len(order)) - torch.searchsorted(in_order, in_order)).to(torch.int32)
    return windows, 2 * listed + partial, ranks


def _expand(tiles: TileMap, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers [map_batch, map_heads, rows + 1] into a list of all tiles from start to stop of each run, in
    row order; of each of these its run, and which tile it is."""
    counts = (stop - start).long()
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = ends[tiles.row_ptr.long()].to(torch.int32)
    maps = tiles.map_batch, tiles.map_heads
    # The last pointer of a map is the first of the next: windows of rows + 1 that overlap by one.
    windows = rows.unfold(0, tiles.rows + 1, tiles.rows) if tiles.rows else rows.expand(maps[0] * maps[1], 1)
    run = torch.arange(len(counts)).repeat_interleave(counts, output_size=int(ends[-1]))
    listed = ((start - ends[:-1])[run] + torch.arange(len(run))).to(torch.int32)
    return windows.unflatten(0, maps), run, listed


def _padded(pointers: Tensor, rows: int) -> Tensor:
    """Rows that a shorter sequence does not have are empty."""
    last = pointers[..., -1:].expand(*pointers.shape[:-1], rows + 1 - pointers.shape[-1])
    return torch.cat((pointers, last), -1)
