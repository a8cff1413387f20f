"""Pictures of block maps, and of masks that are not compiled."""

from __future__ import annotations

import re

import numpy
import pytest
import torch

from fa4flex import BlockMap, InputError
from fa4flex.variants import causal, document, sliding_window
from fa4flex.view.plot import ticks


def drawn_map(batch: int = 1, heads: int = 3) -> BlockMap:
    return BlockMap(torch.randint(0, 3, (batch, heads, 5, 8), dtype=torch.uint8), (128, 64), 600, 500)


def test_a_notebook_shows_densities_of_heads() -> None:
    blocks = drawn_map()
    html = blocks._repr_html_()
    assert "600 queries x 500 keys in blocks of 128 x 64" in html and html.count("<svg") == 3
    rows = re.findall(r"<tr>(.*?)</tr>", html)[1:]
    for h, row in enumerate(rows):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
        listed = blocks.classes[0, h] != 0
        counts = listed.sum(1).tolist()
        assert cells == [
            f"head {h}", f"{100 * sum(counts) / 40:.1f} %", str(int((blocks.classes[0, h] == 2).sum())),
            str(int((blocks.classes[0, h] == 1).sum())), str(min(counts)), f"{sum(counts) / 5:.1f}",
            str(max(counts)),
        ]  # fmt: skip
    many = drawn_map(2, 20)._repr_html_()
    assert "4 of 40 planes drawn" in many and "and 24 more" in many and len(many) < 200_000


def test_figures_of_maps() -> None:
    pytest.importorskip("matplotlib")
    figure = drawn_map().plot()
    assert len(figure.axes) == 3 and [x.get_title(loc="left")[:6] for x in figure.axes] == [
        "head 0",
        "head 1",
        "head 2",
    ]
    one = drawn_map().plot(h=1)
    assert "head 1" in one.axes[0].get_title(loc="left") and len(one.axes) == 1
    assert [int(x) for x in one.axes[0].get_xticks()] == [0, 64, 128, 192, 256, 320, 384, 448]
    assert len(drawn_map(1, 20).plot().axes) == 16
    assert len(drawn_map(1, 1).plot().axes) == 1
    for options in ({"h": 3}, {"b": -1}, {"h": 1.0}):
        with pytest.raises(InputError, match="an int from 0 to"):
            drawn_map(2, 3).plot(**options)


def test_ticks_are_ends_of_tiles_and_few() -> None:
    for length, tile in ((600, 128), (65536, 128), (7, 1), (100_000, 3), (5, 64)):
        found = ticks(length, tile)
        assert found[0] == 0 and len(found) <= 9 and all(at % tile == 0 and at <= length for at in found)


def test_any_mask_draws_itself() -> None:
    pytest.importorskip("matplotlib")
    figure = (causal & sliding_window(16)).plot(64)
    assert figure.axes[0].get_title(loc="left") == "(causal() & sliding_window(16))"
    assert drawn_map().mask(causal).plot(600, 500, h=2).axes[0].get_xlim() == (0, 500)
    assert (causal & drawn_map()).plot(600, 500).axes[0].get_ylim() == (600, 0)


def test_families_of_masks_are_drawn_with_their_defaults() -> None:
    pytest.importorskip("matplotlib")
    bare, called = causal.plot(20, 30), causal().plot(20, 30)
    images = [figure.axes[0].images[0].get_array() for figure in (bare, called)]
    titles = [figure.axes[0].get_title(loc="left") for figure in (bare, called)]
    assert bool(numpy.all(images[0] == images[1])) and titles[0] == titles[1]
    with pytest.raises(InputError, match=r"document\(\) with nothing"):
        document.plot(20)
