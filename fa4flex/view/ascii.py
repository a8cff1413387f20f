"""A mask as text: `#` full, `+` partial, `.` empty."""

from __future__ import annotations

from fa4flex.view.grid import EMPTY, FULL, PARTIAL, Grid

GLYPHS = {EMPTY: ".", PARTIAL: "+", FULL: "#"}
LEGEND = "# full   + partial   . empty"


def fit(grid: Grid, width: int = 64) -> Grid:
    """`grid` in at most `width` columns and rows; half as many rows where it must shrink.

    Characters are about twice as high as wide, so half the rows keep a large square mask square.
    """
    if grid.columns <= width and grid.rows <= width:
        return grid
    return grid.coarsen(max(width // 2, 1), width)


def draw(grid: Grid) -> str:
    """One character per cell, queries downwards and keys to the right."""
    return "\n".join("".join(GLYPHS[int(cell)] for cell in row) for row in grid.classes)
