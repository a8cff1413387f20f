"""Counts of selected pairs in explanations, beside brute force."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex import BlockMap, Lists
from fa4flex.primitives.base import call_mod
from fa4flex.variants import causal
from fa4flex.view.mask import MaskView, tiles_of
from fa4flex.view.sizes import setting
from fa4flex.view.sparsity import in_words, selected


def brute(mask: Any, batch: int, heads: int, q_len: int, kv_len: int) -> int:
    indices = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, q_len, kv_len)), indexing="ij")
    return int(call_mod(mask, tuple(indices), {"q_len": q_len, "kv_len": kv_len, "num_heads": heads}).sum())


def compositions() -> list[dict[str, Any]]:
    classes = torch.randint(0, 3, (2, 3, 5, 4), dtype=torch.uint8)
    ids = torch.randint(-1, 6, (1, 3, 9, 2))
    return [
        {"blocks": BlockMap(classes, (8, 16), 37, 60)},
        {"blocks": BlockMap(classes[:1, :1], (8, 16), 37, 60)},
        {"blocks": BlockMap(classes, (8, 16), 37, 60), "mask": causal},
        {"blocks": Lists(ids, kv_len=60, unit=16, queries=4, q_len=35, window=5, sinks=3), "mask": causal},
    ]


@pytest.mark.parametrize("number", range(4))
def test_selected_pairs_are_counted(number: int) -> None:
    program = fa4flex.compile(**compositions()[number]).program
    chosen = setting(program)
    shape = chosen.shape
    for tile in ((8, 16), (16, 8), (128, 128)):
        tiles = tiles_of(program, chosen, tile)
        planes = tiles.map_batch, tiles.map_heads, shape.q_len, shape.kv_len
        least, most = selected(program, shape, tiles)
        assert least == most == brute(program.variant.allowed, *planes)
        _, partial, full = tiles.counts()
        rows, columns = min(tile[0], shape.q_len), min(tile[1], shape.kv_len)
        computed = (partial + full) * rows * columns
        assert f"{most} pairs selected" in in_words(program, shape, tiles)
        assert f"compute {computed}, of which" in in_words(program, shape, tiles)


def test_of_many_pairs_the_count_is_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    program = fa4flex.compile(**compositions()[2]).program
    chosen = setting(program)
    tiles = tiles_of(program, chosen, (8, 16))
    exact, _ = selected(program, chosen.shape, tiles)
    monkeypatch.setattr("fa4flex.view.sparsity.MOST_EVALUATED", 0)
    least, most = selected(program, chosen.shape, tiles)
    assert least <= exact <= most and least < most
    assert f"{least} to {most} pairs selected" in in_words(program, chosen.shape, tiles)


def test_explanations_count_and_give_the_time_of_what_remains() -> None:
    """The least time is that of the tiles that are computed: a map of a fourth of them takes a fourth."""
    classes = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    classes[..., :4] = 2
    few, all = (BlockMap(x, 128, 2048, 2048) for x in (classes, torch.full_like(classes, 2)))
    times = []
    for blocks in (few, all):
        said = fa4flex.compile(blocks=blocks).explain(arch="sm_90a", heads=64)
        times.append(float(re.search(r"tiles that remain ([0-9.]+) us", " ".join(said.split()))[1]))  # type: ignore[index]
    assert times[0] == pytest.approx(times[1] / 4, rel=0.02)
    assert "pairs selected" not in fa4flex.compile(mask=causal).explain(512)
    listed = fa4flex.compile(
        blocks=Lists(torch.zeros(1, 1, 8, 1).int(), kv_len=512, unit=64, queries=64, sinks=2)
    )
    assert "a captured table" in listed.explain() and "besides: sinks 2" in " ".join(listed.explain().split())
    assert MaskView(listed.program).draw(512, 512)
