"""Keys in pages that a kernel reads where they lie: how many of them one copy brings, and which pages allow
that."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa4flex.codegen.plan.memory import column_block
from fa4flex.codegen.plan.problem import Problem

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
    return math.gcd(problem.page_rows, tile_n)


def in_boxes(problem: Problem, tile_n: int) -> bool:
    """True if tiles of so many keys can be brought in boxes."""
    boxes = tile_n // box_rows(problem, tile_n)
    return boxes <= LANES or boxes % LANES == 0


def readable(problem: Problem, widths: tuple[int, int]) -> bool:
    """True if rows of pages, or as many of them as lie next to each other, are whole lines of shared memory,
    as addresses of TMA copies there have to be. widths: of the tiles of K and of V."""
    return all(problem.page_rows * column_block(d) * problem.itemsize % LINE == 0 for d in widths)


def explain_pages(problem: Problem, tile_n: int, boxes: Boxes | None = None) -> list[str]:
    """Lines about pages; none where keys have none."""
    if not problem.page_rows:
        return []
    rows = box_rows(problem, tile_n)
    whole = [name for name, one in zip("KV", boxes.whole) if one] if boxes else []
    return [
        f"pages: read in place; a tile is brought in {tile_n // rows} x {rows} keys, which lie where the page"
        " table says",
        *([f"  of {' and '.join(whole)}, a copy has all columns"] if whole else []),
    ]
