"""Keys in pages that a kernel reads where they lie: how many of them one copy brings, and which pages allow
that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.memory import column_block
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.topology import Action, Event, Ring, Role

LINE = 128
"""Bytes of shared memory: a TMA copy writes from a multiple of it on."""

LANES = 32
"""Boxes of a tile that a warp looks up at once; of more, a multiple of it."""

COLUMNS, KEYS = 64, 8
"""Columns and keys that are swizzled together, of 16 bits each: a tile in shared memory is made of such."""


@dataclass(frozen=True)
class Boxes:
    """Keys that one TMA copy brings, `rows` of them; and of K and of V, whether it brings whole rows, or a
    block of columns."""

    rows: int
    whole: tuple[bool, bool] = (False, False)

    def shapes(self, widths: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Keys and columns of a copy, of tiles of K and of V of these widths."""
        k, v = (
            (self.rows, width if whole else column_block(width)) for width, whole in zip(widths, self.whole)
        )
        return k, v


Producing = Literal["alone", "apart", "gathering"]
"""Producers of a kernel for many rows: one warp brings all, by TMA; another one brings values; or four warps
copy rows of keys and values that lie in pages, one of which brings queries as well."""

MOST_BOXES = 16
"""Boxes of a tile for many rows, at most, that two warps bring; of more, rows are copied."""

GATHERED = 32
"""Keys of a tile are a multiple of it where four warps copy their rows, eight at a time."""


@dataclass(frozen=True)
class TileCopies:
    """Copies that bring a tile of keys for few rows, of which `box_rows` surely lie together: one warp's TMA
    boxes of these, or rows one by one, which `gather_warps` share."""

    box_rows: int
    gather_warps: int = 0

    @property
    def warps(self) -> int:
        """Warps of the role that brings tiles."""
        return max(self.gather_warps, 1)

    def ring(self, table: BarrierTable, name: str, rows: int, row: tuple[int, int]) -> Ring:
        """The ring of tiles: keys of a tile, bytes of a row and of its part in a block of columns."""
        size, span = row
        copies = (self.box_rows * span,) * (size // span * (rows // self.box_rows))
        return table.ring(name, rows * size, () if self.gather_warps else copies)

    def role(self, name: str, warp: int = 0) -> Role:
        """The role that brings a tile of keys and one of values at a time."""
        bring: Action = "fill" if self.gather_warps else "load"
        tile = tuple(Event(action, ring) for ring in ("k", "v") for action in ("acquire", bring))
        return Role(name, self.warps, (), tile, tile, warp=warp)


class Gathering:
    """Properties of a configuration that has `gather_warps`: how many warps copy pages row by row."""

    gather_warps: int
    lengths: Lengths

    @property
    def gathers(self) -> bool:
        """True if pages are copied row by row."""
        return self.gather_warps > 0

    def brings(self, warp: Any) -> Any:
        """True for the warps of the first warpgroup that bring keys and values."""
        # Of a range of one, the compiler does not see that it is one, and spills elsewhere.
        return warp < self.gather_warps if self.gathers else warp == 0

    @property
    def clears(self) -> bool:
        """True if what lies past the end of a sequence is brought, too, and has to be cleared."""
        return self.lengths != "dense" and not self.gathers


def boxes_of(problem: Problem, tile_n: int) -> Boxes:
    """The boxes of tiles of so many keys, for kernels that have them of whole rows where that is possible."""
    rows = box_rows(problem, tile_n)
    k, v = (_in_rows(width, rows) for width in (problem.head_dim, problem.head_dim_v))
    return Boxes(rows, (k, v))


def _in_rows(width: int, rows: int) -> bool:
    """True if a box of so many keys can have several blocks of columns. Those of a tile that is wider than
    the tensor end with zeros, which TMA brings only past the end of a dimension of their own."""
    return width > COLUMNS and width % COLUMNS == 0 and rows % KEYS == 0


def box_rows(problem: Problem, tile_n: int) -> int:
    """Keys that one TMA copy brings: all of a tile, or as many as surely lie together in a page."""
    return math.gcd(problem.keys.together, tile_n)


def producing(problem: Problem, tile_n: int) -> Producing:
    """The producers of a kernel for many rows, whose tiles have so many keys."""
    if not problem.keys.loaded:
        return "alone"
    many = tile_n // box_rows(problem, tile_n) > MOST_BOXES
    return "gathering" if many and tile_n % GATHERED == 0 else "apart"


def too_many_boxes(problem: Problem, tile_n: int) -> bool:
    """True for tiles whose boxes keep two warps busy, and whose rows four cannot share."""
    many = tile_n // box_rows(problem, tile_n) > MOST_BOXES
    return many and producing(problem, tile_n) == "apart"


def in_boxes(problem: Problem, tile_n: int) -> bool:
    """True if tiles of so many keys can be brought in boxes."""
    boxes = tile_n // box_rows(problem, tile_n)
    return boxes <= LANES or boxes % LANES == 0


def readable(problem: Problem, widths: tuple[int, int]) -> bool:
    """True if rows of pages, or as many of them as lie next to each other, are whole lines of shared memory,
    as addresses of TMA copies there have to be. widths: of the tiles of K and of V."""
    return all(problem.keys.together * column_block(d) * problem.itemsize % LINE == 0 for d in widths)


def explain_pages(
    problem: Problem, tile_n: int, boxes: Boxes | None = None, gather_warps: int = 0
) -> list[str]:
    """Lines about pages; none where keys have none. gather_warps: those that copy rows; 0: TMA brings
    boxes."""
    if not problem.keys.loaded:
        return []
    if gather_warps:
        return [f"pages: read in place; {gather_warps} warps copy rows, 16 bytes a lane"]
    rows = box_rows(problem, tile_n)
    whole = [name for name, one in zip("KV", boxes.whole) if one] if boxes else []
    return [
        f"pages: read in place; a tile is brought in {tile_n // rows} x {rows} keys, which lie where the page"
        " table says",
        *([f"  of {' and '.join(whole)}, a copy has all columns"] if whole else []),
    ]
