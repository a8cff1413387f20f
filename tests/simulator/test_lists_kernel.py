"""The kernels for listed keys on simulated GPUs: right against float64, as its graph says, and
nothing found, whatever lists hold, however heads are grouped, and however many blocks share the keys."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from decoding import split_in
from listed import (
    CHIPS,
    MODS,
    TIMINGS,
    Called,
    Size,
    attend,
    check,
    compare,
    drawn_lists,
    drawn_size,
    tensors,
)

import fa4flex
from fa4flex import Lists
from fa4flex.runtime import listed_keys
from fa4flex.runtime.listed_keys import tiling_of
from fa4flex.variants import causal

DRAWS = 2


@pytest.mark.slow
@pytest.mark.parametrize("beside", (False, True), ids=("lists alone", "keys beside"))
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("chip", CHIPS)
def test_variant(chip: Any, name: str, beside: bool, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Masks and mods see the index of each key; a key that is listed and seen besides counts once."""
    rng, attn = random.Random(seed), fa4flex.compile(*MODS[name])
    for _ in range(DRAWS):
        split_in(monkeypatch, rng.choice((1, 2, 3)))
        size = drawn_size(rng)
        check(attn, tensors(size), blocks=drawn_lists(rng, size, beside), chip=chip)


SHARED = {
    "128:1": (128, 1, 1, 3),
    "65:1": (65, 1, 1, 1),
    "130:1": (130, 1, 1, 1),
    "16:1, rows of 5": (16, 1, 5, 7),
    "40:2, rows of 4": (40, 2, 4, 6),
    "2:1, rows of 100": (2, 1, 100, 130),
}
"""Heads of queries and of keys, queries that share a list, and all queries."""

THREADS = {"sm_90a": 384, "sm_100a": 288}
"""Threads of a block where more than 64 rows share a list: two consumer warpgroups on Hopper."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing[0])
@pytest.mark.parametrize("chip", CHIPS)
def test_many_rows(
    chip: Any, name: str, timing: tuple[str, int], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """More rows share a list than one product of Hopper's has: a tile has twice as many, and what is gathered
    serves all of them."""
    heads, kv_heads, queries, q_len = SHARED[name]
    rng, splits = random.Random(seed), seed % 3 + 1
    split_in(monkeypatch, splits)
    size = Size(heads, kv_heads, rng.choice((1, kv_heads)), q_len, rng.choice((1, 63, 150, 300)))
    lists = drawn_lists(rng, size, seed % 2 == 0, queries=queries, counted=rng.random() < 0.5)
    found = check(
        fa4flex.compile(*MODS[rng.choice(tuple(MODS))]), tensors(size), blocks=lists, timing=timing, chip=chip
    )
    assert {x.shape.block for x in found.gathered} == {(THREADS[chip], 1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_rows_that_share_a_list_gather_it_once(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are copied row by row, besides queries, are half of those of tiles of 64 rows each."""
    size, copied = Size(128, 1, 1, 1, 640), []
    ids = torch.randperm(640)[:300].sort().values.int().view(1, 1, 1, -1)
    qkv, lists = tensors(size), Lists(ids, kv_len=640, q_len=1)
    for rows in (64, 1000):
        monkeypatch.setattr(listed_keys, "ROWS", rows)
        found = check(fa4flex.compile(), qkv, blocks=lists, chip=chip)
        copied.append(gathered(found, 128))
    assert 2 * copied[0] == copied[1] > 0


UNITED = {
    "16:1": (16, 1, 1, 9),
    "32:2": (32, 2, 1, 6),
    "1:1": (1, 1, 1, 33),
    "7:1": (7, 1, 1, 5),
    "4:1, rows of 3": (4, 1, 3, 14),
}
"""Heads of queries and of keys, queries that share a list, and all queries."""


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITED)
@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing[0])
@pytest.mark.parametrize("chip", CHIPS)
def test_united_lists(
    chip: Any, name: str, timing: tuple[str, int], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tiles have the queries of several rows of the lists, of which each sees what its own list has."""
    heads, kv_heads, queries, q_len = UNITED[name]
    rng = random.Random(seed)
    split_in(monkeypatch, rng.choice((1, 2, 3)))
    kv_len, batch = rng.choice((1, 63, 150, 300)), rng.choice((1, 2))
    of_lists = {"list_heads": rng.choice((1, kv_heads)), "lists": rng.choice((1, batch))}
    size = Size(heads, kv_heads, q_len=q_len, kv_len=kv_len, batch=batch, **of_lists)
    more = {"queries": queries, "capacity": rng.choice((1, 5, 8)), "counted": rng.random() < 0.5}
    lists = drawn_lists(rng, size, rng.random() < 0.5, dtype=rng.choice((torch.int32, torch.int64)), **more)
    united = tiling_of(lists, heads, kv_heads).united
    assert united > 1
    found = check(
        fa4flex.compile(*MODS[rng.choice(tuple(MODS))]), tensors(size), blocks=lists, timing=timing, chip=chip
    )
    (result,) = found.gathered
    rows = -(-q_len // queries)
    tiles = batch * max(kv_heads, size.list_heads) * -(-rows // united)
    assert result.shape.grid[0] % tiles == 0 and result.shape.grid[0] <= 3 * tiles


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_what_united_lists_share_is_gathered_once(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens whose lists are the same gather as much as one of them does; and four whose lists have
    nothing in common, as much as one by one."""
    size, copied = Size(16, 1, 1, 4, 640), {}
    qkv, same = tensors(size), torch.randperm(40)[:8].int().expand(1, 1, 4, 8).contiguous()
    apart = torch.randperm(40)[:32].int().view(1, 1, 4, 8)
    for (name, ids), most in itertools.product({"same": same, "apart": apart}.items(), (256, 0)):
        monkeypatch.setattr(listed_keys, "MOST_UNITED", most)
        found = check(fa4flex.compile(), qkv, blocks=Lists(ids, kv_len=640, q_len=4, unit=16), chip=chip)
        copied[name, most] = gathered(found, 64 if most else 4 * 64)
    assert 4 * copied["same", 256] == copied["same", 0]
    assert copied["apart", 256] == copied["apart", 0] == copied["same", 0] > 0


def gathered(found: Called, rows: int) -> int:
    """Bytes of keys and values that warps have copied row by row. On Hopper, so many rows of queries, of 64
    elements, were copied likewise."""
    (result,) = found.gathered
    lines = {x.line for x in result.program.kernel.body if x.opcode.startswith("cp.async.cg")}
    queries = 2 * 64 * rows * (found.chip == "sm_90a")
    return sum(size for line, size in result.shared.items() if line in lines) - queries


WIDTHS = {"128": (128, 128), "96 and 40": (96, 40), "256": (256, 256), "40": (40, 40)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("chip", CHIPS)
def test_widths(chip: Any, name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, attn = random.Random(seed), fa4flex.compile(mask=causal)
    for _ in range(DRAWS):
        split_in(monkeypatch, rng.choice((1, 2)))
        size = drawn_size(rng, *WIDTHS[name])
        check(attn, tensors(size), blocks=drawn_lists(rng, size, True), chip=chip)


PARTS = {
    "a tile of its own": {"capacity": 129, "window": 1},
    "queries of a tile": {"capacity": 128, "queries": 40, "window": 128},
    "tail and first keys": {"capacity": 9, "unit": 16, "queries": 8, "tail": 8, "sinks": 140},
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_parts_of_a_fixed_size_hold_all_keys(chip: Any, name: str, seed: int) -> None:
    """Keys beside lists have tiles of their own, for which there has to be a part."""
    given = {"unit": 1, "queries": 1, **PARTS[name]}
    capacity, q_len = given.pop("capacity"), given["queries"]
    ids = torch.stack([torch.randperm(700 // given["unit"])[:capacity]]).int()[None, None]
    lists = Lists(ids, kv_len=700, q_len=q_len, **given)
    attn = fa4flex.compile(schedule=fa4flex.Schedule(split=1))
    check(attn, tensors(Size(1, 1, 1, q_len, 700)), blocks=lists, chip=chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_counts_and_long_ids(chip: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Counts of 0 and more, ids of 64 bits, float16, heads behind tokens."""
    rng = random.Random(seed)
    attn = fa4flex.compile(mask=causal)
    swapped = fa4flex.compile(mask=causal, layout="bshd")
    for _ in range(DRAWS):
        split_in(monkeypatch, rng.choice((1, 2)))
        size = drawn_size(rng)
        lists = drawn_lists(rng, size, dtype=torch.int64, counted=True)
        qkv = tensors(size, torch.float16)
        check(attn, qkv, blocks=lists, chip=chip)
        check(
            swapped,
            [x.transpose(1, 2).contiguous() for x in qkv],
            blocks=lists,
            timing=("late", 1),
            chip=chip,
        )


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_autocast(chip: Any, seed: int) -> None:
    """Queries, keys and values are cast, as without lists."""
    size = drawn_size(random.Random(seed))
    qkv, lists = tensors(size, torch.float32), drawn_lists(random.Random(seed), size)
    attn = fa4flex.compile(mask=causal)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(attn, *qkv, blocks=lists, chip=chip)
    assert found.out.dtype == torch.bfloat16 and found.gathered
    compare(found, *attn(*(x.bfloat16().double() for x in qkv), blocks=lists, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_repeated_ids_count_once(chip: Any) -> None:
    """Ids in any order, of which many stand twice or more, some far apart, and in other splits; so many that
    the table's places meet."""
    attn, size = fa4flex.compile(), Size(4, 1, 1, 2, 900)
    for order in ("random", "ascending", "twice over"):
        ids = torch.randint(0, 900, (1, 1, 2, 1500), dtype=torch.int32)
        if order == "ascending":
            ids = ids.sort(-1).values
        elif order == "twice over":
            half = torch.randperm(900)[:750].sort().values.int()
            ids = torch.cat((half, half)).expand(1, 1, 2, -1).contiguous()
        check(attn, tensors(size), blocks=Lists(ids, kv_len=900), chip=chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_not_listed_is_not_read(chip: Any, seed: int) -> None:
    """All other keys and values are NaN."""
    torch.manual_seed(seed)
    size = Size(8, 2, 2, 3, 260)
    q, k, v = tensors(size)
    ids = torch.stack([torch.randperm(65)[:20] for _ in range(6)]).view(1, 2, 3, 20).int()
    lists, attn = Lists(ids, kv_len=260, unit=4), fa4flex.compile()
    listed = lists.classes()[0].amax(1).bool().repeat_interleave(4, 1)  # [2, 260]
    for h in range(2):
        for x in (k, v):
            x[0, h, ~listed[h]] = torch.nan
    found = attend(attn, q, k, v, blocks=lists, chip=chip)
    assert found.gathered
    compare(
        found, *attn(q.double(), *(x.double().nan_to_num() for x in (k, v)), blocks=lists, return_lse=True)
    )
