"""Rows of a tile of queries: the queries of one head, or of all heads of a group, which share a KV head.

Of a group, row r of KV head h is query r // group of head h * group + r % group. Where the group divides
a warpgroup's rows, one tensor map finds these: its modes are columns, heads, queries and batch, as of any
tensor, and a box has all heads of the group and as many queries as 64 rows then are. What lies past the last
query is zeros, or of packed tensors the next sequence's, and is not written.

Rows r and r + 8, of which a thread has parts, are of the same head where the group divides 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.key_values import kv_head_of
from fa4flex.kernels.common.products import ROWS
from fa4flex.kernels.common.transfer import reordered, sequence
from fa4flex.kernels.common.work import Grid, Work, dense_grid, packed_grid
from fa4flex.kernels.fwd_sm90.config import Config

HALF = 8
"""Rows of half of the accumulator's tile of 16: a thread has row r of the first half, and of the second."""


class Rows(Protocol):
    """Map from a row of a head of the grid to a query and its head."""

    def grid(self, arguments: Arguments, ordered: bool) -> Grid:
        """The grid of dense tensors; `ordered` as of `dense_grid`."""

    def packed_grid(self, arguments: Arguments) -> Grid:
        """The grid of packed tensors."""

    def transfer(self, op: Any, tensor: cute.Tensor, layout: Any, width: int) -> cpasync.TmaInfo:
        """Descriptor of copies of 64 rows of q or of the output."""

    def tiles(self, transfer: cpasync.TmaInfo, work: Work, width: int) -> cute.Tensor:
        """(64, width, number): the rows of a head of the grid, 64 at a time."""

    def kv_head(self, work: Work, grid: Grid, arguments: Arguments) -> Int32:
        """Head of keys and values that a tile attends to."""

    def count(self, work: Work) -> Int32:
        """Number of rows."""

    def place(self, work: Work, row: Int32) -> tuple[Work, Int32]:
        """The work of a row's head, and its query."""

    @property
    def offsets(self) -> tuple[int, int]:
        """Queries of rows r and r + 8, less that of row r."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of one head: row r is query r."""

    config: Config

    def grid(self, arguments: Arguments, ordered: bool) -> Grid:
        grid: Grid = dense_grid(arguments, self.config.tile_m, ordered, self.config.short_tiles)
        return grid

    def packed_grid(self, arguments: Arguments) -> Grid:
        grid: Grid = packed_grid(arguments, self.config.tile_m)
        return grid

    def transfer(self, op: Any, tensor: cute.Tensor, layout: Any, width: int) -> cpasync.TmaInfo:
        modes = [1, 3, 2, 0] if cute.rank(tensor) == 4 else [0, 2, 1]
        return cpasync.make_tiled_tma_atom(op, reordered(tensor, modes), layout, (ROWS, width))

    def tiles(self, transfer: cpasync.TmaInfo, work: Work, width: int) -> cute.Tensor:
        whole = sequence(transfer.tma_tensor, work.q_offset, work.h, work.b)
        return cute.local_tile(whole, (ROWS, width), (None, 0))

    def kv_head(self, work: Work, grid: Grid, arguments: Arguments) -> Int32:
        return kv_head_of(work, grid, arguments)

    def count(self, work: Work) -> Int32:
        return work.q_len

    def place(self, work: Work, row: Int32) -> tuple[Work, Int32]:
        return work, row

    @property
    def offsets(self) -> tuple[int, int]:
        return 0, HALF


@dataclass(frozen=True)
class GroupRows:
    """Rows of `config.group` heads, which divides 64: the heads of the grid are those of keys."""

    config: Config

    @property
    def box(self) -> tuple[int, int]:
        """Heads and queries of 64 rows."""
        return self.config.group, ROWS // self.config.group

    def grid(self, arguments: Arguments, ordered: bool) -> Grid:
        """Sections have as many KV heads as without groups."""
        group, tile_m = self.config.group, self.config.tile_m
        grid = dense_grid(arguments, tile_m, ordered, self.config.short_tiles)
        tiles = Int32(cute.ceil_div(arguments.q.shape[1] * group, tile_m))
        return Grid(tiles, grid.heads // group, grid.batch, cutlass.max(grid.group // group, Int32(1)))

    def packed_grid(self, arguments: Arguments) -> Grid:
        grid: Grid = packed_grid(arguments, self.config.tile_m // self.config.group)
        return grid._replace(heads=grid.heads // self.config.group)

    def transfer(self, op: Any, tensor: cute.Tensor, layout: Any, width: int) -> cpasync.TmaInfo:
        modes = [2, 1, 3, 0] if cute.rank(tensor) == 4 else [1, 0, 2]
        rows = cute.group_modes(reordered(tensor, modes), 0, 2)
        return cpasync.make_tiled_tma_atom(op, rows, layout, (self.box, width))

    def tiles(self, transfer: cpasync.TmaInfo, work: Work, width: int) -> cute.Tensor:
        """((heads of the group, queries), width, number)."""
        whole = transfer.tma_tensor
        if cute.rank(whole) == 2:
            whole = cute.domain_offset(((0, work.q_offset), 0), whole)
        else:
            whole = whole[None, None, work.b]
        return cute.local_tile(whole, (self.box, width), ((work.h, None), 0))

    def kv_head(self, work: Work, grid: Grid, arguments: Arguments) -> Int32:
        return work.h

    def count(self, work: Work) -> Int32:
        return work.q_len * self.config.group

    def place(self, work: Work, row: Int32) -> tuple[Work, Int32]:
        group = self.config.group
        return work._replace(h=work.h * group + row % group), row // group

    @property
    def offsets(self) -> tuple[int, int]:
        return 0, HALF // self.config.group


def rows_of(config: Config) -> Rows:
    return HeadRows(config) if config.group == 1 else GroupRows(config)
