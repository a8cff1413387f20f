"""Counts of selected pairs in explanations, beside brute force."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex import BlockMap, Lists
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.primitives.base import call_mod
from fa4flex.variants import causal
from fa4flex.view.listed import Tiling, counted
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


# --- lists of a call ----------------------------------------------------------------------------------------


def drawn_lists(rng: random.Random, heads: int) -> Lists:
    q_len, kv_len = rng.randint(5, 300), rng.randint(5, 300)
    unit, queries = rng.choice([1, 3, 16]), rng.choice([1, 2])
    rows, cap = -(-q_len // queries), rng.randint(1, 6)
    ids = torch.randint(-1, -(-kv_len // unit) + 1, (rng.randint(1, 2), heads, rows, cap), dtype=torch.int32)
    counts = torch.randint(0, cap + 1, ids.shape[:3]) if rng.random() < 0.5 else None
    near = rng.choice([{}, {"window": rng.randint(1, 90)}, {"tail": 1, "sinks": 2}])
    return Lists(ids, counts, kv_len=kv_len, q_len=q_len, unit=unit, queries=queries, **near)


def tiles_of_lists(lists: Lists, tiling: Tiling, batch: int, heads: int) -> int:
    """Tiles of keys, tile of rows by tile of rows: units that any row lists, and keys beside them."""
    bare = replace(lists, window=0, tail=0, sinks=0)
    alone = replace(lists, ids=torch.full_like(lists.ids, -1))
    own, groups = lists.ids.shape[1], max(tiling.kv_heads, lists.ids.shape[1])
    shape = batch, own, lists.q_len, lists.kv_len
    grids = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    context = {"q_len": lists.q_len, "kv_len": lists.kv_len, "num_heads": own}
    units, near = (call_mod(x.mask(), tuple(grids), context) for x in (bare, alone))
    count, step = 0, tiling.united * lists.queries
    for b in range(batch):
        for h in range(groups):
            for first in range(0, lists.q_len, step):
                part = slice(first, first + step)
                heads_of_tile = max(heads // groups, 1)
                rows = heads_of_tile * min(lists.queries, lists.q_len) * tiling.united
                of_list = units[b, h * own // groups, part].any(0)
                padded = torch.nn.functional.pad(of_list, (0, -len(of_list) % lists.unit))
                keys = int(padded.view(-1, lists.unit).any(1).sum())
                both = keys * lists.unit, int(near[b, h * own // groups, part].any(0).sum())
                count += sum(-(-n // tiling.keys) for n in both) * -(-rows // tiling.rows)
    return count


@pytest.mark.parametrize("number", range(10))
def test_pairs_and_tiles_of_lists_are_counted(number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    own = rng.choice([1, 2])
    lists, heads = drawn_lists(rng, own), own * rng.choice([1, 4])
    kv_heads = rng.choice([n for n in (own, heads) if n % own == 0])
    batch = lists.ids.shape[0] * rng.choice([1, 2]) if lists.ids.shape[0] == 1 else 2
    slopes = torch.rand(heads)
    masks = [None, causal, lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b) * slopes[h] > 40]
    program = fa4flex.compile(mask=rng.choice(masks)).program
    shape = Shape(batch, heads, lists.q_len, lists.kv_len)
    tiling = Tiling(64, 64, rng.choice([1, 2, 4]), kv_heads)
    found = counted(program, shape, lists, tiling)
    both = fa4flex.as_mask(lists) if program.variant.mask is None else lists.mask(program.variant.mask)
    assert found.selected == brute(both, batch, heads, lists.q_len, lists.kv_len)
    assert found.tiles == tiles_of_lists(lists.to("cpu"), tiling, batch, heads)
    assert found.share == 1


def test_of_many_rows_some_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that list alike are counted by a few of them."""
    ids = torch.arange(4, dtype=torch.int32).expand(1, 1, 512, 4)
    lists, shape = Lists(ids, kv_len=512, unit=16), Shape(1, 16, 512, 512)
    program, tiling = fa4flex.compile().program, Tiling(64, 64, 4, 1)
    monkeypatch.setattr("fa4flex.view.sparsity.MOST_EVALUATED", 1 << 12)
    found = counted(program, shape, lists, tiling)
    assert found.share < 0.1
    assert found.selected == 16 * 512 * 64 and found.tiles == 128


def test_explanations_of_lists_are_of_what_they_list() -> None:
    ids = torch.arange(16, dtype=torch.int32).expand(1, 1, 1024, 16).contiguous()
    lists = Lists(ids, kv_len=4096, unit=64)
    attn = fa4flex.compile(mask=causal)
    said = " ".join(attn.explain(arch="sm_90a", heads=64, kv_heads=1, lists=lists).split())
    assert "q_len=1024, kv_len=4096 alone" in said and "of the tiles are computed" not in said
    assert f"{64 * 1024 * 1024} pairs selected, 25.0 % of all" in said
    # Each tile has one query's 64 heads and its 1,024 keys: 64 rows and 16 tiles of 64.
    assert f"tiles of 64 x 64 compute {1024 * 16 * 64 * 64}, of which 100.0 % are selected" in said
    assert "bound: at best" not in said
    assert "on a CPU forward and backward, the map of what is listed" in said
    least = 4 * 64 * 1024 * 1024 * 128 / 989.4e12 * 1e6
    told = re.search(r"least time of their products ([0-9.]+) us", said)
    assert told is not None and float(told[1]) == pytest.approx(least, rel=0.01)
    other = " ".join(attn.explain(arch="sm_100a", heads=64, kv_heads=1, lists=lists).split())
    assert f"tiles of 64 x 64 compute {1024 * 16 * 64 * 64}, of which 100.0 % are selected" in other
    rows = {"head_dim": 576, "head_dim_v": 512, "latent": True}
    none = " ".join(attn.explain(arch="sm_100a", heads=64, kv_heads=1, lists=lists, **rows).split())
    assert "no kernel" in none and "the lists are a map of blocks" in none
    short = replace(lists, ids=ids[..., :1], unit=1)
    assert "keys are refused; blocks=lists.map() is a table" in " ".join(
        attn.explain(arch="sm_100a", heads=64, kv_heads=1, lists=short, **rows).split()
    )


def test_maps_within_masks_are_counted() -> None:
    classes = torch.randint(0, 2, (1, 1, 8, 8), dtype=torch.uint8)
    blocks = BlockMap(classes, 64, 512, 512)
    said = " ".join(fa4flex.compile(mask=causal & blocks).explain(512, heads=4, arch="sm_90a").split())
    exact = brute(causal & blocks, 1, 1, 512, 512)
    assert said.count(f"{exact} pairs selected in each head") == 2
    there = " ".join(fa4flex.compile(mask=causal & blocks).explain(512, heads=4, arch="sm_100a").split())
    assert "least time over the tiles that remain" in there and "candidates" not in there
