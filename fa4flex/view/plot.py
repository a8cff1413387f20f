"""A mask as a matplotlib figure. Imported only when a plot is asked for: matplotlib is optional."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fa4flex.view.grid import EMPTY, FULL, PARTIAL, Grid
from fa4flex.view.svg import COLOURS

INK, PAPER, EMPTY_FILL, HOLE = "#2b3140", "#ffffff", "#eceff4", "#fbe3bd"
MOST_CELLS = 256
MOST_TILE_LINES = 64
MOST_TICKS = 8
TITLE_WIDTH = 70


class MaskFigure(Figure):
    """A Figure that notebooks show by itself, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png", dpi=110)
        return target.getvalue()


def plot(grid: Grid, title: str, tokens: numpy.ndarray | None = None) -> Figure:
    """Tile classes; with `tokens` [q_len, kv_len] bool, every pair, coloured by the class of its tile."""
    figure = MaskFigure(figsize=(6.4, 6.6), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if tokens is None:
        grid = grid.coarsen(MOST_CELLS, MOST_CELLS)
        _image(axes, grid.classes, [EMPTY_FILL, COLOURS[PARTIAL], COLOURS[FULL]], grid)
    else:
        colours = [EMPTY_FILL, HOLE, COLOURS[PARTIAL], COLOURS[FULL]]
        _image(axes, _token_classes(grid, tokens), colours, grid)
    _tile_lines(axes, grid)
    _dress(axes, grid, title)
    axes.legend(handles=_legend(tokens is not None), loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4,
                frameon=False, fontsize=9, handlelength=1, handleheight=1)  # fmt: skip
    return figure


def plots(grids: Sequence[tuple[str, Grid]], title: str) -> Figure:
    """Tile classes of several grids side by side, each under its name."""
    across = min(len(grids), 4)
    down = math.ceil(len(grids) / across)
    figure = MaskFigure(figsize=(2.6 * across + 0.6, 2.8 * down + 1), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, 28 * across), fontsize=11, color=INK)
    for at, (name, grid) in enumerate(grids):
        axes = figure.add_subplot(down, across, at + 1)
        grid = grid.coarsen(MOST_CELLS, MOST_CELLS)
        _image(axes, grid.classes, [EMPTY_FILL, COLOURS[PARTIAL], COLOURS[FULL]], grid)
        _tile_lines(axes, grid)
        _dress(axes, grid, name, 4)
    figure.legend(handles=_legend(False), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def ticks(length: int, tile: int, most: int = MOST_TICKS) -> list[int]:
    """Ends of tiles to write numbers at, `most` and one at most: each second, fourth, eighth ... of them."""
    step = tile
    while length // step > most:
        step *= 2
    return list(range(0, length + 1, step))


def _image(axes, classes: numpy.ndarray, colours: list[str], grid: Grid) -> None:  # type: ignore[no-untyped-def]
    axes.imshow(
        classes, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, interpolation="nearest",
        extent=(0, grid.kv_len, grid.q_len, 0), aspect="equal" if _squarish(grid) else "auto",
    )  # fmt: skip


def _squarish(grid: Grid) -> bool:
    return 0.25 <= grid.q_len / grid.kv_len <= 4


def _token_classes(grid: Grid, tokens: numpy.ndarray) -> numpy.ndarray:
    """0 in an empty tile, 1 masked in a partial tile, 2 allowed in a partial tile, 3 in a full tile."""
    spread = grid.classes.repeat(grid.tile[0], axis=0).repeat(grid.tile[1], axis=1)[
        : grid.q_len, : grid.kv_len
    ]
    return numpy.select([spread == EMPTY, spread == FULL], [0, 3], 1 + tokens.astype(int))


def _tile_lines(axes, grid: Grid) -> None:  # type: ignore[no-untyped-def]
    if max(grid.rows, grid.columns) <= MOST_TILE_LINES:
        axes.hlines(numpy.arange(1, grid.rows) * grid.tile[0], 0, grid.kv_len, colors=PAPER, linewidth=0.8)
        axes.vlines(numpy.arange(1, grid.columns) * grid.tile[1], 0, grid.q_len, colors=PAPER, linewidth=0.8)


def _dress(axes, grid: Grid, title: str, most: int = MOST_TICKS) -> None:  # type: ignore[no-untyped-def]
    axes.set_title(textwrap.fill(title, TITLE_WIDTH), fontsize=11, color=INK, loc="left", pad=24)
    axes.set_xticks(ticks(grid.kv_len, grid.tile[1], most))
    axes.set_yticks(ticks(grid.q_len, grid.tile[0], most))
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query", color=INK)
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.set_xlim(0, grid.kv_len)
    axes.set_ylim(grid.q_len, 0)
    for side in axes.spines.values():
        side.set_color("#c6ccd8")


def _legend(tokens: bool) -> list[Patch]:
    rows = [("full tile", COLOURS[FULL]), ("partial tile", COLOURS[PARTIAL]), ("empty tile", EMPTY_FILL)]
    if tokens:
        rows.insert(2, ("masked in a partial tile", HOLE))
    return [Patch(facecolor=colour, edgecolor="#c6ccd8", label=label) for label, colour in rows]
