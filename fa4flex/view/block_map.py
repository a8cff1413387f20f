"""A block map to look at: its blocks as SVG with the density of each head, or as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fa4flex.default_device import on_the_host
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.lists import Lists
from fa4flex.view import svg
from fa4flex.view.grid import EMPTY, FULL, PARTIAL, Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DRAWN, MOST_PLOTTED, MOST_ROWS = 4, 16, 16
"""Planes (batch, head) of a notebook's picture and of a figure, and lines of a table."""

MOST_SHOWN, MOST_MADE = 1 << 24, 1 << 28
"""Blocks of the map of lists that a notebook draws by itself, and that a figure is made of."""

BESIDE = "tail", "window", "sinks"


@on_the_host
def html(blocks: BlockMap) -> str:
    """HTML of the first planes, and a table of the density of each."""
    planes = planes_of(blocks)
    names = list(planes)
    panels = [(name, grid_of(blocks, planes[name])) for name in names[:MOST_DRAWN]]
    facts = [f"{len(panels)} of {len(names)} planes drawn"] if len(panels) < len(names) else []
    return svg.picture(panels, title_of(blocks), facts) + _table(blocks, planes)


@on_the_host
def html_of_lists(lists: Lists) -> str:
    """HTML of the map of lists; of a large one, the number of entries of each head's rows."""
    if blocks_of(lists) <= MOST_SHOWN:
        return html(lists.map())
    outline = f"{lists.q_len} queries x {lists.kv_len} keys in blocks of {lists.queries} x {lists.unit}"
    live = (lists.ids >= 0) & (lists.ids * lists.unit < lists.kv_len)
    if lists.counts is not None:
        live &= torch.arange(lists.capacity, device=live.device) < lists.counts.unsqueeze(-1)
    entries = live.sum(-1).cpu().numpy()
    heads = ("", "entries of a row: fewest", "mean", "most")
    lines = [
        (name, int(rows.min()), f"{rows.mean():.1f}", int(rows.max()))
        for name, rows in _named(entries).items()
    ]
    return svg.picture([], outline + beside(lists), ["too many blocks to draw"]) + _rows(heads, lines)


def figure_of_lists(lists: Lists, b: int, h: int | None) -> Figure:
    """A figure of the map of lists. Raises UnsupportedError for one of too many blocks."""
    if blocks_of(lists) > MOST_MADE:
        raise UnsupportedError(
            f"plot() of {lists!r}, whose map has {blocks_of(lists)} blocks",
            f"{MOST_MADE} blocks at most",
            "draw a part of the rows: lists[:, :, :64].plot()",
        )
    return figure(lists.map(), b, h)


def blocks_of(lists: Lists) -> int:
    """Blocks of the map of lists, a byte each."""
    batch, heads, rows, _ = lists.ids.shape
    return batch * heads * rows * -(-lists.kv_len // lists.unit)


def beside(blocks: BlockMap | Lists) -> str:
    """Keys that every query sees beside its blocks, in words that go on; empty for none."""
    listed = [f"{name} {getattr(blocks, name)}" for name in BESIDE if getattr(blocks, name, 0)]
    return f"; every query sees besides: {', '.join(listed)}" if listed else ""


@on_the_host
def figure(blocks: BlockMap, b: int, h: int | None) -> Figure:
    """A figure of one head, or of all heads of an entry of the batch."""
    try:
        from fa4flex.view.plot import plot, plots
    except ImportError as error:
        raise UnsupportedError(
            "plot() without matplotlib",
            "matplotlib >= 3.8",
            "pip install 'fa4flex[plot]'; a notebook shows the map as it is",
        ) from error
    batch, heads = blocks.classes.shape[:2]
    for name, value, size in (("b", b, batch), ("h", 0 if h is None else h, heads)):
        if not isinstance(value, int) or not 0 <= value < max(size, 1 if size > 1 else value + 1):
            raise InputError(f"{name}={value!r}", f"an int from 0 to {size - 1}", "count from 0")
    entry = _classes(blocks)[min(b, batch - 1)]
    if h is not None or heads == 1:
        at = min(h or 0, heads - 1)
        name = f", head {at}" if heads > 1 else ""
        return plot(grid_of(blocks, entry[at]), f"{title_of(blocks)}{name}")
    shown = min(heads, MOST_PLOTTED)
    grids = [(f"head {at}: {_percent(entry[at])}", grid_of(blocks, entry[at])) for at in range(shown)]
    more = f", {shown} of {heads} heads" if shown < heads else ""
    return plots(grids, f"{title_of(blocks)}{more}")


def title_of(blocks: BlockMap) -> str:
    """The map in words."""
    rows, columns = blocks.block_size
    share = 100 * (1 - blocks.sparsity)
    return (
        f"{blocks.q_len} queries x {blocks.kv_len} keys in blocks of {rows} x {columns}, {share:.1f} % listed"
        f"{beside(blocks)}"
    )


def planes_of(blocks: BlockMap) -> dict[str, numpy.ndarray]:
    """Classes [R, C] of every entry of the batch and head, by their names."""
    return _named(_classes(blocks))


def _named(values: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """Values [...] of every entry of the batch and head of [b, h, ...], by their names."""
    batch, heads = values.shape[:2]
    result = {}
    for b in range(batch):
        for h in range(heads):
            parts = [f"batch {b}"] * (batch > 1) + [f"head {h}"] * (heads > 1)
            result[", ".join(parts) or "all heads"] = values[b, h]
    return result


def _classes(blocks: BlockMap) -> numpy.ndarray:
    found: numpy.ndarray = blocks.classes.cpu().numpy()
    return found


def grid_of(blocks: BlockMap, plane: numpy.ndarray) -> Grid:
    return Grid(plane, blocks.block_size, blocks.q_len, blocks.kv_len)


def _percent(plane: numpy.ndarray) -> str:
    return f"{100 * float((plane != EMPTY).mean()):.1f} %"


def _table(blocks: BlockMap, planes: dict[str, numpy.ndarray]) -> str:
    """Density of each plane, and the fewest, the mean and the most blocks of a row."""
    heads = ("", "listed", "full", "partial", "blocks of a row: fewest", "mean", "most")
    lines: list[tuple[Any, ...]] = []
    for name, plane in planes.items():
        rows = (plane != EMPTY).sum(1)
        lines.append(
            (
                name, _percent(plane), int((plane == FULL).sum()), int((plane == PARTIAL).sum()),
                int(rows.min()), f"{rows.mean():.1f}", int(rows.max()),
            )
        )  # fmt: skip
    return _rows(heads, lines)


def _rows(heads: Sequence[str], values: Sequence[Sequence[Any]]) -> str:
    """A table of the first MOST_ROWS lines of values."""
    lines = ["".join(f"<th style='text-align:right;padding:0 8px'>{x}</th>" for x in heads)]
    for cells in values[:MOST_ROWS]:
        texts = (escape(str(x)) for x in cells)
        lines.append("".join(f"<td style='text-align:right;padding:0 8px'>{x}</td>" for x in texts))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    left = len(values) - MOST_ROWS
    more = f"<div style='opacity:.8'>and {left} more</div>" if left > 0 else ""
    return f"<table style='font:12px/1.5 system-ui,sans-serif;border-collapse:collapse'>{body}</table>{more}"
