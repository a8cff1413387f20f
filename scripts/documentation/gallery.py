"""The gallery: a picture of every variant, drawn by the code that stands below it."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import fa4flex
from fa4flex import reference, variants
from fa4flex.view.grid import FULL, PARTIAL
from fa4flex.view.plot import EMPTY_FILL, HOLE
from fa4flex.view.svg import COLOURS

MASKS: dict[str, tuple[str, int, int]] = {
    "causal": ("causal", 128, 128),
    "sliding_window": ("sliding_window(32)", 128, 128),
    "symmetric_window": ("symmetric_window(20)", 128, 128),
    "dilated_window": ("dilated_window(window=32, dilation=4)", 128, 128),
    "global_window": ("global_window(window=16, tokens=8)", 128, 128),
    "chunked_local": ("chunked_local(32)", 128, 128),
    "streaming_llm": ("streaming_llm(sinks=8, window=32)", 128, 128),
    "prefix_lm": ("prefix_lm(40)", 128, 128),
    "document": ("causal & document(torch.arange(128) // 43)", 128, 128),
    "shared_prefix": (
        "shared_prefix(torch.tensor([0, 48, 80, 128]), torch.tensor([0, 0, 0]))", 128, 128),
    "bigbird": ("bigbird(128, block=8, random_blocks=2)", 128, 128),
    "checkerboard": ("checkerboard(8)", 128, 128),
    "block_diffusion": ("block_diffusion(64, 8)", 128, 128),
    "natten": ("natten((12, 12), (5, 5))", 144, 144),
    "sliding_tile": ("sliding_tile((12, 12), (12, 4), (4, 4))", 144, 144),
    "tree": ("tree([-1, 0, 0, 1, 1, 2, 2, 3, 4, 6, 7, 7], prefix_len=12)", 12, 24),
    "vision_cross": (
        "vision_cross(torch.tensor([[0, 60], [20, 60], [60, 128]]), 32)", 128, 96),
}  # fmt: skip
"""Variant -> the mask as code, queries, keys."""

START = ("document", "streaming_llm", "block_diffusion", "natten")
"""Masks that the start page shows."""

COMPOSED: tuple[tuple[str, int, int], ...] = (
    ("sliding_window(24) | streaming_llm(4, 20)", 128, 128),
    ("causal & ~sliding_window(32)", 128, 128),
    ("causal & document(torch.arange(128) // 43) & sliding_window(24)", 128, 128),
    ("causal", 32, 128),
)
"""Masks of several variants, and of other queries than keys."""

SCORES: dict[str, str] = {
    "alibi": "alibi",
    "relative_position": "relative_position(0.05)",
    "learned_bias": "learned_bias(torch.randn(8, 127).cumsum(1))",
    "t5_bias": "t5_bias(torch.randn(32, 8))",
    "graphormer": "graphormer(-torch.arange(8.0).expand(8, 8), torch.randint(8, (1, 64, 64)))",
    "sandwich": "sandwich(64)",
}
"""Score mods of indices: what they add to scores of 0, of head 0, 64 queries and keys."""

CURVES: dict[str, str] = {"softcap": "softcap(20.0)"}
"""Score mods of the score alone."""

WITHOUT_PICTURE = {"gpt_oss_sinks", "mla"}
"""Variants that change neither a mask nor a score."""

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
    scores = [_figure(folder, name, code, _scores(code)) for name, code in SCORES.items()]
    scores += [_figure(folder, name, code, _curve(code)) for name, code in CURVES.items()]
    masks = [_figure(folder, name, code, _mask(code, q, kv)) for name, (code, q, kv) in MASKS.items()]
    composed = [
        _figure(folder, f"composed_{i}", code, _mask(code, q, kv), _lengths(q, kv))
        for i, (code, q, kv) in enumerate(COMPOSED)
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
    return _grid([_html(f"{place}{name}", name, MASKS[name][0], name) for name in START])


def _lengths(q_len: int, kv_len: int) -> str:
    return "" if q_len == kv_len else f"{q_len} queries, {kv_len} keys"


def _grid(figures: list[str]) -> str:
    return '<div class="gallery">\n' + "\n".join(figures) + "\n</div>"


def _figure(folder: Path, name: str, code: str, figure: Figure, title: str | None = None) -> str:
    """HTML of one picture, which is written to `folder`."""
    figure.savefig(folder / f"{name}.png", dpi=DPI)
    return _html(name, name, code, name if title is None else title)


def _html(place: str, name: str, code: str, title: str) -> str:
    data = f'<img alt="{escape(name)}: {escape(code, quote=True)}" loading="lazy" src="{place}.png">'
    heading = f"<strong>{escape(title)}</strong>" if title else ""
    return f"<figure>{data}<figcaption>{heading}<code>{escape(code)}</code></figcaption></figure>"


def _evaluated(code: str) -> Any:
    torch.manual_seed(0)
    names = {name: getattr(variants, name) for name in variants.__all__}
    return eval(code, {**names, "torch": torch})


def _mask(code: str, q_len: int, kv_len: int) -> Figure:
    """`attn.mask.plot`, at the size of a thumbnail."""
    figure = fa4flex.compile(mask=_evaluated(code)).mask.plot(q_len, kv_len)
    axes = figure.axes[0]
    axes.set_title("", loc="left")
    legend = axes.get_legend()
    assert legend is not None
    legend.remove()
    figure.set_size_inches(SIDE, SIDE * min(1, 0.3 + q_len / kv_len))
    return figure


def _scores(code: str, length: int = 64) -> Figure:
    zeros = torch.zeros(1, 8, length, length, dtype=torch.float64)
    everywhere = torch.ones_like(zeros, dtype=torch.bool)
    found = reference.modified_scores(zeros, everywhere, _evaluated(code))
    figure = Figure(figsize=(SIDE, SIDE), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(found[0, 0].detach().numpy(), cmap="PuOr", interpolation="nearest")
    largest = float(found[0, 0].abs().max())
    picture.set_clim(-largest, largest)
    figure.colorbar(picture, shrink=0.8).ax.tick_params(labelsize=7)
    axes.tick_params(labelsize=7)
    return figure


def _curve(code: str) -> Figure:
    scores = torch.linspace(-60, 60, 241, dtype=torch.float64)
    row = scores.view(1, 1, 1, -1)
    found = reference.modified_scores(row, torch.ones_like(row, dtype=torch.bool), _evaluated(code))
    figure = Figure(figsize=(SIDE, SIDE), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(scores, found.flatten(), color=COLOURS[FULL])
    axes.grid(color=EMPTY_FILL)
    axes.tick_params(labelsize=7)
    return figure
