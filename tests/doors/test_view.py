"""Explanations, listings and pictures: their numbers against brute force, their text against its promises."""

from __future__ import annotations

import functools
import importlib
import operator
import re
import sys
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
import torch

import fa4flex
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.plan.target import TARGETS
from fa4flex.variants import (
    alibi,
    causal,
    document,
    prefix_lm,
    sliding_window,
    softcap,
    symmetric_window,
)
from fa4flex.view import ascii, gpu, svg
from fa4flex.view.explain import explain
from fa4flex.view.grid import Grid


def random_grid(rng: numpy.random.Generator, rows: int, columns: int) -> Grid:
    return Grid(
        rng.integers(0, 3, (rows, columns)).astype(numpy.uint8), (16, 8), rows * 16 - 5, columns * 8 - 3
    )


def brute_force(mask: object, q_len: int, kv_len: int, tile: tuple[int, int]) -> numpy.ndarray:
    """Tile classes from every pair."""
    q, kv = torch.arange(q_len).view(-1, 1), torch.arange(kv_len)
    allowed = mask(0, 0, q, kv, q_len=q_len, kv_len=kv_len).expand(q_len, kv_len).numpy()  # type: ignore[operator]
    rows, columns = -(-q_len // tile[0]), -(-kv_len // tile[1])
    classes = numpy.zeros((rows, columns), numpy.uint8)
    for r in range(rows):
        for c in range(columns):
            part = allowed[r * tile[0] : (r + 1) * tile[0], c * tile[1] : (c + 1) * tile[1]]
            classes[r, c] = 2 if part.all() else 1 if part.any() else 0
    return classes


# --- the grid -------------------------------------------------------------------------------------------


def test_rectangles_tile_the_grid(seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    for _ in range(20):
        grid = random_grid(rng, *rng.integers(1, 30, 2))
        painted = numpy.zeros_like(grid.classes)
        for r in grid.rectangles():
            assert not painted[r.top : r.bottom, r.left : r.right].any(), "rectangles overlap"
            painted[r.top : r.bottom, r.left : r.right] = r.tile_class
        assert (painted == grid.classes).all()


def test_coarsening_is_the_class_of_the_union(seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    for _ in range(20):
        grid = random_grid(rng, *rng.integers(1, 60, 2))
        limit = int(rng.integers(1, 20))
        small = grid.coarsen(limit, limit)
        assert small.rows <= limit and small.columns <= limit
        by_row, by_column = small.tile[0] // grid.tile[0], small.tile[1] // grid.tile[1]
        for r in range(small.rows):
            for c in range(small.columns):
                part = grid.classes[r * by_row : (r + 1) * by_row, c * by_column : (c + 1) * by_column]
                wanted = part.flat[0] if (part == part.flat[0]).all() else 1
                assert small.classes[r, c] == wanted


# --- text, SVG, figure ----------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Checks that tags nest, and gathers rectangles by their titles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


TITLE = re.compile(r"(full|partial): q (\d+)–(\d+), kv (\d+)–(\d+)")


@pytest.mark.parametrize("mask", [causal & sliding_window(300), prefix_lm(500)], ids=repr)
def test_svg_titles_cover_the_tiles(mask: fa4flex.Mask) -> None:
    attn = fa4flex.compile(mask=mask)
    page = Tags()
    page.feed(attn._repr_html_())
    assert not page.open
    classes = numpy.zeros((16, 16), numpy.uint8)
    for name, q0, q1, k0, k1 in TITLE.findall(page.text):
        assert int(q0) % 128 == int(k0) % 128 == 0 and int(q1) % 128 == int(k1) % 128 == 127
        rows, columns = slice(int(q0) // 128, int(q1) // 128 + 1), slice(int(k0) // 128, int(k1) // 128 + 1)
        classes[rows, columns] = 2 if name == "full" else 1
    assert (classes == brute_force(attn.variant.mask, 2048, 2048, (128, 128))).all()
    empty, partial, full = (int((classes == c).sum()) for c in (0, 1, 2))
    assert f"256 tiles: {full} full, {partial} partial, {empty} empty" in page.text


def test_svg_is_small_and_self_contained(seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    for side in (3, 64, 700):
        panels = [(f"head {h} <&>", random_grid(rng, side, side)) for h in range(4)]
        html = svg.picture(panels, "a <mask> & more", ["fact"])
        assert len(html.encode()) < 200_000
        html = html.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, not a resource
        assert "http" not in html and "<script" not in html and "<mask>" not in html
        Tags().feed(html)


def test_svg_shows_single_tiles_in_every_renderer() -> None:
    """Lines are filled boxes inside the drawing's units: nothing depends on strokes or their scaling."""
    html = fa4flex.compile(mask=sliding_window(300))._repr_html_()
    image = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    assert image.tag == "{http://www.w3.org/2000/svg}svg" and "stroke" not in html
    _, _, columns, rows = map(int, image.attrib["viewBox"].split())
    assert (columns, rows) == (16, 16)
    (lines,) = image.iter("{http://www.w3.org/2000/svg}path")
    boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-", lines.attrib["d"])
    found = {tuple(float(n) for n in box) for box in boxes}
    thick = svg.LINE * columns / int(image.attrib["width"])
    for n in range(1, 16):
        assert any(abs(x + w / 2 - n) < 1e-3 and abs(w - thick) < 1e-2 and h == rows for x, _, w, h in found)
        assert any(
            abs(y + h / 2 - n) < 1e-3 and abs(h - thick) < 1e-2 and w == columns for _, y, w, h in found
        )


def test_html_shows_each_head_that_differs() -> None:
    attn = fa4flex.compile(
        mask=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 64 * (h + 1))
    )
    html = attn._repr_html_()
    assert html.count("<svg") == 4 and "4 of 8 (batch, head) pairs drawn" in html


def test_the_mask_that_is_drawn_is_that_of_now() -> None:
    window, ids = 3, torch.zeros(16, dtype=torch.int64)
    attn = fa4flex.compile(mask=lambda b, h, q, kv: (q - kv < window) & (ids[q] == ids[kv]))
    for window, ids in ((3, torch.arange(16) // 8), (5, torch.arange(16) // 4)):
        lines = attn.mask.draw(16, 16, tile=(1, 1)).splitlines()[-16:]
        i = torch.arange(16)
        allowed = (i[:, None] - i < window) & (ids[:, None] == ids)
        assert lines == ["".join("#" if x else "." for x in row) for row in allowed]


def test_ascii_matches_brute_force() -> None:
    attn = fa4flex.compile(mask=sliding_window(70))
    lines = attn.mask.draw(256, 192, tile=(16, 16)).splitlines()[-16:]
    wanted = brute_force(attn.variant.mask, 256, 192, (16, 16))
    assert lines == ["".join(".+#"[c] for c in row) for row in wanted]
    wide = ascii.draw(ascii.fit(Grid(numpy.zeros((900, 900), numpy.uint8), (1, 1), 900, 900))).splitlines()
    assert max(map(len, wide)) <= 64


def test_plot_shows_every_pair() -> None:
    pytest.importorskip("matplotlib")
    attn = fa4flex.compile(mask=sliding_window(50))
    figure = attn.mask.plot(100, 120)
    image = figure.axes[0].images[0].get_array()
    q, kv = torch.arange(100).view(-1, 1), torch.arange(120)
    allowed = attn.variant.mask(0, 0, q, kv, q_len=100, kv_len=120).numpy()  # type: ignore[misc]
    assert ((numpy.asarray(image) >= 2) == allowed).all()
    assert figure._repr_png_()[:4] == b"\x89PNG"  # type: ignore[attr-defined]
    tiles = attn.mask.plot(2000, tile=(100, 100)).axes[0].images[0].get_array()
    assert (numpy.asarray(tiles) == brute_force(attn.variant.mask, 2000, 2000, (100, 100))).all()


@pytest.mark.parametrize("length", [100, 600])
def test_plot_shows_the_batch_entry_and_head_asked_for(length: int) -> None:
    pytest.importorskip("matplotlib")
    attn = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: kv_idx < 50 * (b + 1) + 25 * h)
    tile = (25, 25)
    for b, h in ((0, 0), (3, 1), (1, 7)):
        image = attn.mask.plot(length, length, tile, b=b, h=h).axes[0].images[0].get_array()
        shown = (numpy.asarray(image)[0] > 0).sum() * (1 if length == 100 else 25)
        assert shown == min(50 * (b + 1) + 25 * h, length)
    with pytest.raises(InputError, match="b=-1"):
        attn.mask.plot(length, b=-1)


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "fa4flex.view.plot", raising=False)
    with pytest.raises(UnsupportedError, match=r"fa4flex\[plot\]"):
        fa4flex.compile(mask=causal).mask.plot(64)


# --- words ----------------------------------------------------------------------------------------------


def flat(text: str) -> str:
    return " ".join(text.split())


def test_explain_counts_and_alignment() -> None:
    attn = fa4flex.compile(mask=sliding_window(200), schedule=fa4flex.Schedule(tile=(64, 32)))
    text = flat(attn.explain(500, 700))
    classes = brute_force(attn.variant.mask, 500, 700, (64, 32))
    full, partial, empty = (int((classes == c).sum()) for c in (2, 1, 0))
    assert f"{classes.size} tiles: {full} full, {partial} partial, {empty} empty" in text
    assert f"{classes.size} decided by the key intervals" in text
    assert "bottom-right" in text and "window = 200" in text
    top_left = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).explain(64)
    assert "top-left" in top_left and repr(top_left) == str(top_left)


def test_explain_names_captures_and_pins() -> None:
    bias = torch.zeros(4, 99, requires_grad=True)
    steepness, depth = 0.5, 2

    def mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        for _ in range(depth):
            score = score * steepness
        return score + bias[h, q_idx - kv_idx + 49]

    text = flat(fa4flex.compile(score_mod=mod).explain(50))
    assert "bias: float32[4, 99], receives a gradient" in text
    assert "steepness = 0.5: a run-time number" in text
    assert "depth = 2: a constant of this program" in text and "test_view.py" in text
    assert "summed along diagonals" in text


def test_explain_says_why_tiles_are_evaluated(seed: int) -> None:
    ids = torch.arange(8).repeat_interleave(64)[torch.randperm(512)]
    text = flat(fa4flex.compile(mask=document(ids)).explain(4096))
    assert "shown at 512 instead of 4096" in text and "not sorted" in text
    sorted_ids = flat(fa4flex.compile(mask=document(ids.sort().values)).explain(512))
    assert "sorted" in sorted_ids and "not sorted" not in sorted_ids


def test_explain_of_a_block_map_claims_no_proof() -> None:
    blocks = fa4flex.BlockMap.from_dense(torch.tril(torch.ones(4, 4)).bool(), 16)
    assert "the block map fixes q_len at 64: shown at 64 instead of 96" in fa4flex.compile(
        mask=blocks
    ).explain(96)
    text = flat(fa4flex.compile(mask=blocks).explain(64))
    assert "proved" not in text and "all lengths" not in text and "sorted" not in text
    assert "q_len=64, kv_len=64 alone, in blocks of 16 x 16: 0 full, 10 partial, 6 empty" in text
    assert "16 tiles" not in text and "1 tiles: 0 full, 1 partial, 0 empty" in text  # walked, it is too dense
    fitting = fa4flex.compile(mask=blocks, schedule=fa4flex.Schedule(tile=(16, 16)))
    assert "16 tiles: 10 full, 0 partial, 6 empty" in flat(fitting.explain(64))
    with_mask = flat(fa4flex.compile(mask=causal, blocks=blocks).explain(64))
    assert "proved in closed form" not in with_mask and "alone, in blocks of 16 x 16" in with_mask


def test_explain_of_a_block_map_shows_the_tiles_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a CPU gathers are counted as they are, others by the tiles that it walks over; a tile is
    never advised."""
    gathered: list[bool] = []
    forward = importlib.import_module("fa4flex.runtime.cpu.forward")
    tried = forward.scattered
    monkeypatch.setattr(forward, "scattered", lambda *x: gathered.append(tried(*x) is not None) or tried(*x))
    dense = torch.zeros(64, 8, dtype=torch.bool)
    dense[::4, ::4] = True
    for size, tile in (((1, 16), None), ((1, 16), (64, 64)), ((2, 128), None)):
        blocks = fa4flex.BlockMap.from_dense(dense, size)
        attn = fa4flex.compile(mask=blocks, schedule=fa4flex.Schedule(tile=tile))
        q, k, v = (torch.randn(1, 1, n, 16) for n in (blocks.q_len, blocks.kv_len, blocks.kv_len))
        gathered.clear()
        attn(q, k, v)
        ran = size if gathered == [True] else tile or (128, 128)
        text = flat(attn.explain(blocks.q_len, blocks.kv_len, "sm_90a"))
        assert f"tile {ran[0]} x {ran[1]}: " in text and ("gathered" in text) == (gathered == [True])
        assert "Schedule(" not in text


def test_explain_lists_many_intervals_once() -> None:
    chosen = torch.randint(32, (1, 2, 32, 8)).sort(-1).values

    def selected(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        found = [chosen[b, h, q_idx // 64, i] == kv_idx // 64 for i in range(8)]
        return functools.reduce(operator.or_, found)

    text = flat(fa4flex.compile(mask=selected).explain(2048))
    assert "proved in closed form" in text and text.count("chosen[b, h, q // 64, 7]") == 3  # mask, two ends


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_the_bound_follows_the_tiles_that_are_computed(arch: str) -> None:
    ids = torch.randint(3, (1024,)).sort().values
    drawn = fa4flex.BlockMap.from_dense(torch.rand(8, 8) < 0.3, 128)
    opaque = lambda b, h, q_idx, kv_idx: ids[q_idx] * 2 == ids[kv_idx] * 5  # noqa: E731
    peak = next(target for target in TARGETS if target.name == arch).peak_flops
    for mods in (
        {}, {"mask": causal}, {"mask": sliding_window(100)}, {"mask": document(ids)}, {"mask": opaque},
        {"mask": causal, "blocks": drawn}, {"blocks": drawn}, {"mask": ~causal & causal},
    ):  # fmt: skip
        attn = fa4flex.compile(**mods)  # type: ignore[arg-type]
        text = flat(attn.explain(1024, arch=arch, head_dim=64))
        plan = gpu.KernelView(attn.program, {"q_len": 1024, "arch": arch, "head_dim": 64}).lowered.plan
        every = lambda b, h, q_idx, kv_idx: kv_idx >= 0  # noqa: E731
        allowed = fa4flex.as_mask(attn.variant.allowed if mods else every)
        classes = brute_force(allowed, 1024, 1024, plan.tile)
        share = float((classes > 0).mean())
        assert f"{100 * share:.1f} % of the tiles are computed" in text.split("bound:")[1]
        products = re.search(r"tensor cores ([0-9.e-]+) us", text)
        seconds = 4 * 1024**2 * 64 * share / peak
        assert (products is None) == (share == 0)
        assert products is None or float(products[1]) * 1e-6 == pytest.approx(seconds, rel=0.05)


def test_the_bound_counts_the_keys_that_are_read() -> None:
    """A step of decoding through a window reads the window, by each KV head once."""
    window = fa4flex.compile(mask=sliding_window(128))
    sizes = {"heads": 8, "kv_heads": 2, "arch": "sm_90a", "head_dim": 64}

    def memory(kv_len: int, **sizes: Any) -> float:
        return float(re.search(r"HBM ([0-9.e-]+) us", flat(window.explain(1, kv_len, **sizes)))[1])  # type: ignore[index]

    assert memory(8192, **sizes) == memory(65536, **sizes)
    assert memory(8192, **{**sizes, "kv_heads": 8}) == pytest.approx(4 * memory(8192, **sizes), rel=0.1)
    apart = memory(8192, **{**sizes, "kv_heads": 8, "v_heads": 2})
    assert apart == pytest.approx(2.5 * memory(8192, **sizes), rel=0.1)
    told = flat(window.explain(1, 8192, **{**sizes, "v_heads": 1}))
    assert "KV heads: 2 that share a head of v" in window.source("plan", **{**sizes, "v_heads": 1}), told


def test_the_bound_says_where_a_call_decides_which_tiles_are_computed() -> None:
    attn = fa4flex.compile(mask=causal)
    assert "all tiles are counted, as lengths" in flat(attn.explain(1024, arch="sm_90a", lengths="packed"))
    assert "all tiles are counted, as lengths" in attn.source("plan", lengths="used")


@pytest.mark.parametrize(
    ("arch", "direction"),
    [("sm_90a", x) for x in gpu.DIRECTIONS] + [("sm_100a", x) for x in ("forward", "backward")],
)
def test_lines_of_explain_are_whole(arch: str, direction: str) -> None:
    """Each clause of a shown line is there, in the user's names."""
    attn = fa4flex.compile(mask=symmetric_window(20))
    found = attn.explain(2048, arch=arch, direction=direction, head_dim=64)
    text = found.split("on a GPU")[1]
    assert f"{direction} kernel for {arch}" in text and "heads of 64" in text
    if direction == "forward":
        assert "; maxima are raised" in flat(text).split("softmax:")[1] and "+ window)" in flat(text)
    assert " s0" not in text and "t0" not in text
    with pytest.raises(InputError, match="did you mean head_dim"):
        attn.explain(2048, head_dims=64)


def test_explain_says_how_gradients_are_made() -> None:
    assert "backward: a kernel, tile" in fa4flex.compile(mask=causal).explain(512, arch="sm_100a")
    precise = fa4flex.Precision(output=torch.float32)
    text = flat(fa4flex.compile(mask=causal, precision=precise).explain(512, arch="sm_90a"))
    assert "backward: PyTorch operations" in text and "not built: a backward kernel for sm_90a" in text


def test_explain_says_how_sums_per_key_are_made() -> None:
    attn = fa4flex.compile(mask=causal)
    assert "key_mass: a kernel, tile 128 queries x 128 keys" in flat(attn.explain(512, arch="sm_90a"))
    text = flat(attn.explain(512, arch="sm_100a"))
    assert "key_mass: PyTorch operations" in text and "not built: a mass kernel for sm_100a" in text


def test_explain_says_how_tangents_are_made() -> None:
    attn = fa4flex.compile(mask=causal)
    assert "tangents: a kernel, tile 128 queries x" in attn.explain(512, arch="sm_90a")
    text = flat(attn.explain(512, arch="sm_100a"))
    assert "tangents: PyTorch operations" in text and "not built: a tangents kernel for sm_100a" in text
    assert "products: 6 where" in attn.source("plan", direction="tangents", arch="sm_90a")


def test_explain_claims_a_closed_form_only_where_it_holds() -> None:
    ids = torch.tensor([0, 1, 0, 2])
    text = flat(fa4flex.compile(mask=document(ids)).explain(4))
    assert "proved" not in text and "would hold, but not for these tensors" in text and "not sorted" in text
    assert "query q attends" not in text
    assert "proved in closed form" in flat(fa4flex.compile(mask=document(ids.sort().values)).explain(4))


def test_explain_of_a_gpu_is_short_without_one() -> None:
    program = fa4flex.compile(mask=causal).program
    short = str(explain(program, 4096, 4096)).split("on a GPU")[1]
    long = str(explain(program, 4096, 4096, "sm_100a")).split("on a GPU")[1]
    assert len(short.splitlines()) <= 2 and "sm_90a" in short and 'arch="sm_90a"' in short
    assert len(long.splitlines()) > 6 and "forward kernel for sm_100a" in long and "bound:" in long
    with pytest.raises(UnsupportedError, match="arch='sm_80'"):
        explain(program, 64, 64, "sm_80")


def test_explain_names_what_passes_32_bits() -> None:
    mask = lambda b, h, q_idx, kv_idx: q_idx * 65536 + kv_idx >= 0  # noqa: E731
    assert "beyond 32 bits: (q * 65536)" in flat(fa4flex.compile(mask=mask).explain(40000))
    assert "fits 32 bits" in flat(fa4flex.compile(mask=mask).explain(1000))


def test_explain_of_a_long_mod_is_short() -> None:
    """A hash uses each value twice: written out, it would double with each round."""

    def hashed(x):  # type: ignore[no-untyped-def]
        for _ in range(16):
            x = (((x >> 13) ^ x) * 0x45D9F3B) & 0xFFFFFFFF
        return x

    score = lambda score, b, h, q_idx, kv_idx: score + hashed(q_idx) * 1e-10  # noqa: E731
    mask = lambda b, h, q_idx, kv_idx: hashed(q_idx * 999 + kv_idx) % 3 > 0  # noqa: E731
    text = fa4flex.compile(score_mod=score, mask=mask).explain(64, arch="sm_90a")
    assert len(text) < 6000 and 'listed by source("trace")' in flat(text) and "more" in text
    assert "allowed where an expression of" in flat(text) and "beyond 32 bits" in text


def test_source_computes_the_mod() -> None:
    """The listing is close enough to Python to run: it gives the mod's own values."""
    table = torch.randn(300)

    def mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return torch.where(q_idx > kv_idx, score * 2.0, score) + table[q_idx // 2 + kv_idx % 7]

    listing = fa4flex.compile(score_mod=mod).source("trace")
    namespace: dict[str, object] = {"where": torch.where, "table": table}
    exec(listing.split("\n\n")[1], namespace)
    scores, (q, kv) = torch.randn(60, 60), (torch.arange(60).view(-1, 1), torch.arange(60))
    torch.testing.assert_close(namespace["score"](scores, 0, 0, q, kv), mod(scores, 0, 0, q, kv))  # type: ignore[operator]
    assert f"test_view.py:{mod.__code__.co_firstlineno + 1}" in listing


def test_gradient_listing_is_the_derivative() -> None:
    listing = fa4flex.compile(score_mod=softcap(3.0)).source("gradient")
    namespace: dict[str, object] = {"tanh": torch.tanh, "cap": 3.0}
    exec(listing, namespace)
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad((3.0 * torch.tanh(x / 3.0)).sum(), x)
    torch.testing.assert_close(namespace["d_score"](x, 0, 0, 0, 0), exact)  # type: ignore[operator]


def test_stages_that_do_not_exist() -> None:
    attn = fa4flex.compile(score_mod=alibi)
    with pytest.raises(InputError, match="trace, facts, gradient, flex, plan, forward"):
        attn.source("nonsense")
    with pytest.raises(InputError, match="head_dim for stage='trace'"):
        attn.source("trace", head_dim=64)


def test_gpu_stages_show_what_a_gpu_would_run() -> None:
    mod = lambda score, b, h, q_idx, kv_idx: 3.0 * torch.tanh(score / 3.0)  # noqa: E731
    attn = fa4flex.compile(score_mod=mod, mask=fa4flex.variants.causal)
    text = attn.source("forward", head_dim=64)
    compile(text, "generated", "exec")
    assert f"test_view.py:{mod.__code__.co_firstlineno}" in text
    assert len(text.splitlines()) <= 200
    assert attn.source("source", head_dim=64) == text != attn.source("forward", head_dim=128)
    assert "shared memory" in attn.source("plan")


def test_lengths_beyond_a_table_are_refused_in_words() -> None:
    table = torch.rand(64) > 0.5
    attn = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: table[q_idx + kv_idx])
    with pytest.raises(InputError, match="reads beyond a captured tensor"):
        attn.mask.tile_map(4096)
    assert attn.mask.tile_map(32).counts()[1] > 0


def test_errors_of_evaluation_name_tensor_and_line() -> None:
    limits = torch.tensor([5, 7])
    attn = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: kv_idx < limits[q_idx + kv_idx])
    with pytest.raises(InputError, match="past the captured tensor limits of shape") as caught:
        attn.mask.tile_map(64)
    assert caught.value.where is not None and "limits[q_idx + kv_idx]" in caught.value.where.text
    far = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: kv_idx < limits[b] * (1 << q_idx))
    with pytest.raises(UnsupportedError, match="lies between") as refused:
        far.mask.tile_map(64)
    assert refused.value.where is not None and "1 << q_idx" in refused.value.where.text
