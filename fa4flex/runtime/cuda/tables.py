"""Block tables on a device: which tiles of keys each tile of queries visits, as lists of tiles.

A map's runs of tiles are proved on the host, in O(tiles) memory (codegen/analyze/tiles.py), and expanded to
lists on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import on_host
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.tiles import Shape, TileMap, tile_map
from fa4flex.codegen.evaluate import Captured


class BlockTables(NamedTuple):
    """int32: pointers [B, H, query tiles + 1] with stride 0 along what the mask does not depend on, and the
    tiles that they point into. See Tables in codegen/kernels/common/arguments.py."""

    partial_ptr: Tensor
    partial_tiles: Tensor
    full_ptr: Tensor
    full_tiles: Tensor


def dense_tables(
    facts: Facts,
    shape: Shape,
    captured: Captured,
    tile: tuple[int, int],
    device: torch.device,
    by_keys: bool = False,
) -> BlockTables:
    """Tables of a batch whose sequences all have the lengths of `shape`. `by_keys`: the tiles of queries that
    visit each tile of keys."""
    tiles = tile_map(facts.mask, facts.keys, shape, captured, tile)
    return to_device([tiles.transposed() if by_keys else tiles], shape, device)


def ragged_tables(
    facts: Facts,
    shape: Shape,
    captured: Captured,
    tile: tuple[int, int],
    lengths: Sequence[tuple[int, int]],
    device: torch.device,
) -> BlockTables:
    """Tables of a batch of sequences with these (q_len, kv_len), `shape` being their number and heads."""
    captured = on_host(captured, facts.mask)
    shapes = (Shape(1, shape.heads, *pair, b=b) for b, pair in enumerate(lengths))
    maps = [tile_map(facts.mask, facts.keys, one, captured, tile) for one in shapes]
    return to_device(maps, shape, device)


def to_device(maps: Sequence[TileMap], shape: Shape, device: torch.device) -> BlockTables:
    """Lists of tiles: of one map for the whole batch of `shape`, or of a map per sequence."""
    rows = max(tiles.rows for tiles in maps)
    parts = []
    for full in (False, True):
        pointers, listed, before = [], [], 0
        for tiles in maps:
            own, found = _expand(tiles, full)
            pointers.append(_padded(own, rows) + before)
            listed.append(found)
            before += len(found)
        # Kernels read an element before they know whether it counts, so there is at least one.
        listed = [*listed, torch.zeros(1, dtype=torch.int32)] if before == 0 else listed
        whole = torch.cat(pointers).to(device).expand(shape.batch, shape.heads, -1)
        parts += [whole, torch.cat(listed).to(device)]
    return BlockTables(*parts)


def _expand(tiles: TileMap, full: bool) -> tuple[Tensor, Tensor]:
    """([map_batch, map_heads, rows + 1] pointers into the list, all tiles of a class in row order)."""
    # Kernels do not look at the end of a run's axis in full tiles, so a last tile that passes it is not one.
    lengths = tiles.shape.kv_len // tiles.tile[1], tiles.shape.q_len // tiles.tile[0]
    whole = torch.where(tiles.full, tiles.stop.clamp(max=lengths[tiles.axis == "kv"]), tiles.start)
    start, stop = (tiles.start, whole) if full else (whole, tiles.stop)
    counts = (stop - start).long()
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = ends[tiles.row_ptr.long()].to(torch.int32)
    maps = tiles.map_batch, tiles.map_heads
    # The last pointer of a map is the first of the next: windows of rows + 1 that overlap by one.
    windows = rows.unfold(0, tiles.rows + 1, tiles.rows) if tiles.rows else rows.expand(maps[0] * maps[1], 1)
    first = (start - ends[:-1]).repeat_interleave(counts)
    listed = (first + torch.arange(len(first))).to(torch.int32)
    return windows.unflatten(0, maps), listed


def _padded(pointers: Tensor, rows: int) -> Tensor:
    """Rows that a shorter sequence does not have are empty."""
    last = pointers[..., -1:].expand(*pointers.shape[:-1], rows + 1 - pointers.shape[-1])
    return torch.cat((pointers, last), -1)
