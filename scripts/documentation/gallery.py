"""The gallery: a picture of every variant, drawn by the code that stands below it."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from variant_tables import heading_of, module_of

import fa4flex
from fa4flex import Mask, ScoreMod, reference, variants
from fa4flex.primitives.base import settle
from fa4flex.variants._cases import Picture
from fa4flex.view.grid import FULL, PARTIAL
from fa4flex.view.plot import EMPTY_FILL, HOLE
from fa4flex.view.svg import COLOURS

PICTURES: dict[str, Picture] = {
    name: picture for name in variants.__all__ if (picture := module_of(name).PICTURE) is not None
}
"""Pictures that the files of variants declare, by the names of variants."""

START = ("document", "streaming_llm", "block_diffusion", "natten")
"""Masks that the start page shows."""

COMPOSED = (
    Picture("sliding_window(24) | streaming_llm(4, 20)"),
    Picture("causal & ~sliding_window(32)"),
    Picture("causal & document(torch.arange(128) // 43) & sliding_window(24)"),
    Picture("causal", 32, 128),
)
"""Masks of several variants, and of other queries than keys."""

HEAD = """# Gallery

Every picture is drawn by the line below it when this site is built, with the names of `fa4flex.variants`
([what they are](../docs/variants.md)). Queries go down, keys across.

## Masks

"""
LEGEND = (
    ("full tile: the mask is not evaluated", COLOURS[FULL]),
    ("allowed in a partial tile", COLOURS[PARTIAL]),
    ("masked in a partial tile", HOLE),
    ("empty tile: never loaded", EMPTY_FILL),
)
SIDE, DPI = 3.2, 110


def write(folder: Path) -> None:
    """Write index.md and its pictures to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    legend = "<br>".join(
        f'<span class="swatch" style="background:{colour}"></span> {text}' for text, colour in LEGEND
    )
    figures = {name: _figure(folder, name, picture, name) for name, picture in PICTURES.items()}
    masks, scores = (
        [figure for name, figure in figures.items() if heading_of(name) == heading]
        for heading in ("Masks", "Score mods")
    )
    composed = [
        _figure(folder, f"composed_{i}", picture, _lengths(picture)) for i, picture in enumerate(COMPOSED)
    ]
    parts = [
        f"{HEAD}<p>{legend}</p>", _grid(masks), "## Composed", _grid(composed), "## Score mods",
        "What is added to a score of 0, by query and key; for a soft cap, the new score over the old.",
        _grid(scores),
        "`python -m fa4flex draw \"causal & sliding_window(24)\" --size 128` draws a mask as text, "
        "`attn.mask.plot(128, 128)` as above.\n",
    ]  # fmt: skip
    (folder / "index.md").write_text("\n\n".join(parts))


def row(place: str) -> str:
    """HTML of START's pictures, which `write` draws; `place` is the path to them."""
    return _grid([_html(f"{place}{name}", name, PICTURES[name].code, name) for name in START])


def _lengths(picture: Picture) -> str:
    q_len, kv_len = picture.q_len, picture.kv_len
    return "" if q_len == kv_len else f"{q_len} queries, {kv_len} keys"


def _grid(figures: list[str]) -> str:
    return '<div class="gallery">\n' + "\n".join(figures) + "\n</div>"


def _figure(folder: Path, name: str, picture: Picture, title: str) -> str:
    """HTML of one picture, which is written to `folder`."""
    value = settle(_evaluated(picture.code))
    if not isinstance(value, ScoreMod):
        figure = _mask(value, picture.q_len, picture.kv_len)
    else:
        figure = _curve(value) if picture.curve else _scores(value)
    figure.savefig(folder / f"{name}.png", dpi=DPI)
    return _html(name, name, picture.code, title)


def _html(place: str, name: str, code: str, title: str) -> str:
    data = f'<img alt="{escape(name)}: {escape(code, quote=True)}" loading="lazy" src="{place}.png">'
    heading = f"<strong>{escape(title)}</strong>" if title else ""
    return f"<figure>{data}<figcaption>{heading}<code>{escape(code)}</code></figcaption></figure>"


def _evaluated(code: str) -> Any:
    torch.manual_seed(0)
    names = {name: getattr(variants, name) for name in variants.__all__}
    return eval(code, {**names, "torch": torch})


def _mask(mask: Mask, q_len: int, kv_len: int) -> Figure:
    """`attn.mask.plot`, at the size of a thumbnail."""
    figure = fa4flex.compile(mask=mask).mask.plot(q_len, kv_len)
    axes = figure.axes[0]
    axes.set_title("", loc="left")
    legend = axes.get_legend()
    assert legend is not None
    legend.remove()
    figure.set_size_inches(SIDE, SIDE * min(1, 0.3 + q_len / kv_len))
    return figure


def _scores(mod: ScoreMod, length: int = 64) -> Figure:
    zeros = torch.zeros(1, 8, length, length, dtype=torch.float64)
    everywhere = torch.ones_like(zeros, dtype=torch.bool)
    found = reference.modified_scores(zeros, everywhere, mod)
    figure = Figure(figsize=(SIDE, SIDE), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(found[0, 0].detach().numpy(), cmap="PuOr", interpolation="nearest")
    largest = float(found[0, 0].abs().max())
    picture.set_clim(-largest, largest)
    figure.colorbar(picture, shrink=0.8).ax.tick_params(labelsize=7)
    axes.tick_params(labelsize=7)
    return figure


def _curve(mod: ScoreMod) -> Figure:
    scores = torch.linspace(-60, 60, 241, dtype=torch.float64)
    row = scores.view(1, 1, 1, -1)
    found = reference.modified_scores(row, torch.ones_like(row, dtype=torch.bool), mod)
    figure = Figure(figsize=(SIDE, SIDE), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(scores, found.flatten(), color=COLOURS[FULL])
    axes.grid(color=EMPTY_FILL)
    axes.tick_params(labelsize=7)
    return figure
