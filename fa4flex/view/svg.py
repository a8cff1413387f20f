"""A mask as inline SVG: no scripts, no external resources, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fa4flex.view.grid import CLASS_NAMES, FULL, PARTIAL, Grid, Rectangle

# Mid-tones that hold against white and near-black; blue and amber stay apart for colour-blind readers.
COLOURS = {FULL: "#3b7dd8", PARTIAL: "#f2a73b"}
EMPTY_COLOUR = "#8a94a6"
NAMESPACE = "http://www.w3.org/2000/svg"
"""Names the format for renderers outside of a page; nothing is loaded from there."""
LINE = 0.8
"""Width in pixels of the lines that make single tiles countable."""
SIDE = 280
"""Width of one panel in CSS pixels; the height follows the lengths."""
MOST_RECTANGLES = 1100
"""Keeps the text of all panels under 200 KB: a rectangle with its title takes about 150 bytes."""


def picture(panels: Sequence[tuple[str, Grid]], title: str, facts: Sequence[str]) -> str:
    """HTML of the named grids side by side under `title`, with a legend and lines of text."""
    budget = MOST_RECTANGLES // max(len(panels), 1)
    drawn = "".join(_panel(name, _within(grid, budget)) for name, grid in panels)
    lines = "".join(f'<div style="opacity:.8">{escape(line)}</div>' for line in facts)
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;max-width:100%">'
        f'<div style="font-weight:600">{escape(title)}</div>{_legend()}'
        f'<div style="display:flex;flex-wrap:wrap;gap:16px;margin:6px 0">{drawn}</div>{lines}</div>'
    )


def _within(grid: Grid, budget: int) -> Grid:
    """`grid`, coarsened until it needs at most `budget` rectangles."""
    side = 64
    small = grid.coarsen(side, side)
    while sum(1 for _ in small.rectangles()) > budget and side > 4:
        side //= 2
        small = grid.coarsen(side, side)
    return small


LEGEND = (
    ("full: mask not evaluated", COLOURS[FULL], 1.0),
    ("partial: mask evaluated", COLOURS[PARTIAL], 1.0),
    ("empty: never loaded", EMPTY_COLOUR, 0.3),
)


def _legend() -> str:
    swatch = "display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 5px 0 0"
    items = "".join(
        f'<span style="margin-right:14px"><span style="{swatch};background:{colour};opacity:{opacity}">'
        f"</span>{text}</span>"
        for text, colour, opacity in LEGEND
    )
    return f'<div style="font-size:12px;opacity:.9">{items}</div>'


def _panel(name: str, grid: Grid) -> str:
    """One grid; the drawing's unit is a cell, so every rectangle in it has small integers."""
    width = SIDE if grid.kv_len >= grid.q_len else max(SIDE * grid.kv_len // grid.q_len, 48)
    height = min(max(width * grid.q_len // grid.kv_len, 24), 2 * SIDE)
    caption = f'<figcaption style="font-size:12px;opacity:.8">{escape(name)}</figcaption>' if name else ""
    layers = "".join(_layer(tile_class, grid) for tile_class in COLOURS)
    return (
        f'<figure style="margin:0">{caption}'
        f'<svg xmlns="{NAMESPACE}" width="{width}" height="{height}" role="img" '
        f'viewBox="0 0 {grid.columns} {grid.rows}" preserveAspectRatio="none" '
        f'style="border:1px solid {EMPTY_COLOUR};border-radius:3px;display:block">'
        f'<rect width="100%" height="100%" fill="{EMPTY_COLOUR}" fill-opacity=".16">'
        f"<title>empty</title></rect>"
        f"{layers}{_lines(grid, width, height)}</svg>"
        f'<div style="font-size:11px;opacity:.7">{_axes(grid)}</div></figure>'
    )


def _lines(grid: Grid, width: int, height: int) -> str:
    """Lines between cells as thin filled boxes, LINE pixels wide at the panel's size in every renderer."""
    across, down = LINE * grid.columns / width, LINE * grid.rows / height
    path = "".join(
        f"M{x - across / 2:.3f} 0h{across:.3f}v{grid.rows}h-{across:.3f}z" for x in range(1, grid.columns)
    )
    path += "".join(
        f"M0 {y - down / 2:.3f}h{grid.columns}v{down:.3f}h-{grid.columns}z" for y in range(1, grid.rows)
    )
    return f'<path d="{path}" fill="#fff" fill-opacity=".55" pointer-events="none"/>'


def _layer(tile_class: int, grid: Grid) -> str:
    """All rectangles of one class, so that the colour is written once."""
    boxes = "".join(_rectangle(r, grid) for r in grid.rectangles() if r.tile_class == tile_class)
    return f'<g fill="{COLOURS[tile_class]}">{boxes}</g>'


def _rectangle(r: Rectangle, grid: Grid) -> str:
    q_first, q_last = grid.queries(r.top, r.bottom)
    k_first, k_last = grid.keys(r.left, r.right)
    title = f"{CLASS_NAMES[r.tile_class]}: q {q_first}\u2013{q_last}, kv {k_first}\u2013{k_last}"
    box = f'x="{r.left}" y="{r.top}" width="{r.right - r.left}" height="{r.bottom - r.top}"'
    return f"<rect {box}><title>{title}</title></rect>"


def _axes(grid: Grid) -> str:
    rows, columns = grid.tile
    return (
        f"queries \u2193 {grid.q_len} \u00b7 keys \u2192 {grid.kv_len} \u00b7 a cell is {rows}\u00d7{columns}"
    )
