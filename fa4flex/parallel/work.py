"""Work of a mask by chunks of queries, and the chunks of keys that each can see: what placements are made of.

Both follow from the mask's proved tiles. Where the mask is a union of key intervals, that takes time and
memory of the order of its rows, whatever the length; elsewhere tiles are made larger until there are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.rows import one_thread
from fa4flex.codegen.analyze.tilemap import TileMap
from fa4flex.codegen.analyze.tiles import Shape, tile_map
from fa4flex.codegen.evaluate import Captured

MOST_CHUNKS, MOST_KEY_CHUNKS = 4096, 16384
"""Chunks that queries, and keys, are cut into at most; pairs of both are at most MOST_CHUNKS squared."""

FIRST_CHUNKS = 1024
"""Chunks of queries of a mask without key intervals where these are balanced well enough."""

MOST_ROWS, MOST_TILES = 1 << 13, 1 << 20
"""Tiles of queries of a mask with key intervals, and tiles of any other mask, at most."""


@dataclass(frozen=True, eq=False)
class Work:
    """Chunks of `chunk` queries and of `chunk` keys, the last ones short.

    area  float64 [query chunks]: tiles that are not empty, of all batch entries and heads that the mask tells
          apart, in pairs
    sees  bool [query chunks, key chunks]: whether some query of the one may see some key of the other
    tile  queries and keys of the tiles that were proved
    tiles their map, of which `area` and `sees` are sums
    """

    q_len: int
    kv_len: int
    chunk: int
    area: Tensor
    sees: Tensor
    tile: int
    tiles: TileMap | None = None

    def cells(self, chunks: Tensor) -> Tensor:
        """float64 [chunks, key tiles]: the area of some chunks of queries, by tiles of keys."""
        assert self.tiles is not None
        row, high = _rows(self.tiles)
        at = torch.full((len(self.area),), -1).index_put_((chunks,), torch.arange(len(chunks)))
        at = at[row * self.tile // self.chunk]
        here = at >= 0
        at, high = at[here], high[here].double()
        start, stop = self.tiles.start.long()[here], self.tiles.stop.long()[here]
        columns = self.tiles.columns
        steps = torch.zeros(len(chunks), columns + 1, dtype=torch.float64)
        steps.index_put_((at, start), high, accumulate=True).index_put_((at, stop), -high, accumulate=True)
        wide = torch.full((columns,), float(self.tile), dtype=torch.float64)
        wide[-1] = self.kv_len - (columns - 1) * self.tile
        return steps.cumsum(1)[:, :-1] * wide

    @cached_property
    def packed(self) -> Any:
        """`sees` with 8 key chunks to a byte, as numpy joins rows."""
        return numpy.packbits(self.sees.numpy(), axis=1)


def chunk_for(q_len: int, kv_len: int, most: int, tile: int) -> int:
    """Size of chunks: the tile times a power of two, such that queries are cut into `most` at most, where
    they are as many as keys."""
    chunk, most = tile, min(most, MOST_CHUNKS)
    while (
        chunk * most < q_len
        or chunk * MOST_KEY_CHUNKS < kv_len
        or -(-q_len // chunk) * -(-kv_len // chunk) > most**2
    ):
        chunk *= 2
    return chunk


def work_of(facts: Facts, shape: Shape, captured: Captured, tile: int, chunk: int) -> Work:
    """The work of a mask over a whole problem, `chunk` being a multiple of `tile`."""
    side, most = chunk, MOST_TILES
    if facts.keys is not None:
        # A map of few tiles tells whether the captured tables are as the intervals assume.
        tiles = tile_map(facts.mask, facts.keys, shape, captured, (side, side))
        most = MOST_ROWS**2 if tiles.proof.by_intervals else MOST_TILES
    while side % (2 * tile) == 0 and -(-2 * shape.q_len // side) * -(-2 * shape.kv_len // side) <= most:
        side //= 2
    tiles = tile_map(facts.mask, facts.keys, shape, captured, (side, side))
    with one_thread():
        return _summed(tiles, chunk)


def _summed(tiles: TileMap, chunk: int) -> Work:
    shape, side = tiles.shape, tiles.tile[0]
    rows, columns = -(-shape.q_len // chunk), -(-shape.kv_len // chunk)
    row, high = _rows(tiles)
    at = row * side // chunk
    start, stop = tiles.start.long(), tiles.stop.long()
    wide = (stop * side).clamp(max=shape.kv_len) - start * side
    area = torch.zeros(rows, dtype=torch.float64).index_add_(0, at, (high * wide).double())
    steps = torch.zeros(rows, columns + 1, dtype=torch.int32)
    ones = torch.ones(len(at), dtype=torch.int32)
    steps.index_put_((at, start * side // chunk), ones, accumulate=True)
    steps.index_put_(
        (at, (stop * side + chunk - 1).div(chunk, rounding_mode="floor")), -ones, accumulate=True
    )
    sees = steps.cumsum(1, dtype=torch.int32)[:, :-1] > 0
    return Work(shape.q_len, shape.kv_len, chunk, area, sees, side, tiles)


def _rows(tiles: TileMap) -> tuple[Tensor, Tensor]:
    """The row of tiles of each run, and how many queries that has."""
    pointers, side = tiles.row_ptr.long(), tiles.tile[0]
    row = torch.repeat_interleave(torch.arange(len(pointers) - 1), pointers.diff()) % max(tiles.rows, 1)
    return row, (tiles.shape.q_len - row * side).clamp(max=side)
