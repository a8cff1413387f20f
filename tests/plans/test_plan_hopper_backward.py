"""Plans of the Hopper backward: tiles and stages by what a problem takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checked_plans import sizes_of
from helpers import Width, widths
from hopper_backward_plans import BY_DS, FEW_KEYS, FEW_STEPS, FEW_TILES, LIGHT, WIDTHS, planned

import fa4flex
from fa4flex.codegen.analyze.hoist import read_by_pairs
from fa4flex.codegen.expr import nodes
from fa4flex.kernels.bwd_sm90.plan import (
    HALF_TILE,
    LATENT_TILE,
    LONG_LATENT_TILE,
    LONG_TILE,
    PAIR_TILE,
    ROOMY_TILE,
    SHORT_TILE,
    TILE,
    WIDE_TILE,
)
from fa4flex.kernels.plan.groups import groups_of
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM90A


@pytest.mark.parametrize("width", WIDTHS)
def test_every_plan_fits(width: int) -> None:
    for width_v in WIDTHS:
        for problem in (Problem(width, width_v), Problem(width, width_v, sloped=True, lengths="packed")):
            plan = planned(problem)
            assert plan.memory.total <= SM90A.shared_memory
            config = plan.config()
            assert config.persistent == plan.persistent == (config.workers > 0)


@pytest.mark.parametrize(
    ("changes", "tile"),
    [
        ({}, LONG_TILE),
        ({"mask_form": "none"}, LONG_TILE),
        ({"deterministic": True}, LONG_TILE),
        ({"mask_form": "tables"}, TILE),
        ({"long_scores": True}, TILE),
        ({"lengths": "packed"}, TILE),
        ({"sloped": True}, TILE),
        ({"sloped": True, "long_scores": True, "brief": True}, LONG_TILE),
        ({"sloped": True, "long_scores": True, "brief": True, "gradients": ((0, "sum"),)}, TILE),
        ({"head_dim": 64, "head_dim_v": 64, "sloped": True, "long_scores": True, "brief": True}, ROOMY_TILE),
        ({"head_dim": 192, "sloped": True, "long_scores": True, "brief": True}, LATENT_TILE),
        ({"gradients": ((0, "sum"),)}, TILE),
        ({"long_masks": True}, TILE),
        ({"head_dim": 96, "head_dim_v": 96}, TILE),
        ({"head_dim": 64, "head_dim_v": 64}, ROOMY_TILE),
        ({"head_dim": 64, "head_dim_v": 64, "sloped": True}, TILE),
        ({"head_dim": 64, "head_dim_v": 64, "gradients": ((0, "sum"),), "long_scores": True}, TILE),
        ({"head_dim": 64, "head_dim_v": 64, "long_scores": True}, ROOMY_TILE),
        ({"head_dim": 64, "head_dim_v": 64, "long_scores": True, "pair_reads": True}, TILE),
        ({"head_dim": 192}, LONG_LATENT_TILE),
        ({"head_dim": 192, "mask_form": "spans", "deterministic": True}, LONG_LATENT_TILE),
        ({"head_dim": 192, "mask_form": "tables"}, LATENT_TILE),
        ({"head_dim": 192, "lengths": "packed"}, LATENT_TILE),
        ({"head_dim": 192, "long_scores": True}, LATENT_TILE),
        ({"head_dim": 192, "gradients": ((0, "sum"),)}, WIDE_TILE),
        ({"head_dim": 192, "head_dim_v": 192}, WIDE_TILE),
        ({"head_dim": 160, "head_dim_v": 160}, WIDE_TILE),
        ({"head_dim": 160}, LONG_LATENT_TILE),
    ],
    ids=str,
)
def test_queries_of_a_step(changes: dict[str, object], tile: tuple[int, int]) -> None:
    assert planned(replace(LIGHT, **changes)).tile == tile  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "changes", "tile"),
    [
        (FEW_KEYS, {}, SHORT_TILE),
        (sizes_of(kv_len=129), {}, LONG_TILE),
        (sizes_of(1024), {"met_alike": True}, SHORT_TILE),
        (sizes_of(2048), {"met_alike": True}, LONG_TILE),
        (sizes_of(1024), {}, SHORT_TILE),
        (sizes_of(2048), {}, LONG_TILE),
        (sizes_of(512), {"mask_form": "none"}, SHORT_TILE),
        (sizes_of(400), {"mask_form": "none"}, LONG_TILE),
        (sizes_of(640), {"mask_form": "none"}, LONG_TILE),
        (FEW_KEYS, {"head_dim": 64, "head_dim_v": 64}, ROOMY_TILE),
        (FEW_KEYS, {"head_dim": 192}, LONG_LATENT_TILE),
        (FEW_TILES, {}, HALF_TILE),
        (FEW_TILES, {"lengths": "used"}, TILE),
        (FEW_TILES, {"head_dim": 64, "head_dim_v": 64, "gradients": ((0, "sum"),)}, HALF_TILE),
        (sizes_of(kv_len=33 * 128 + 1, heads=2), {}, LONG_TILE),
        (sizes_of(kv_len=16 * 128, heads=2, batch=2), {}, HALF_TILE),
        (sizes_of(kv_len=17 * 128, heads=2, batch=2), {}, LONG_TILE),
    ],
)
def test_queries_of_a_step_by_sizes(sizes: Sizes, changes: dict[str, object], tile: tuple[int, int]) -> None:
    assert planned(replace(LIGHT, **changes), sizes=sizes).tile == tile  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "split", "keeps_k"),
    [
        ({}, "keys", False),
        ({"head_dim": 192, "head_dim_v": 192}, "products", True),
        ({"head_dim": 160, "head_dim_v": 160, "deterministic": True, "lengths": "used"}, "products", True),
        ({"head_dim": 96, "head_dim_v": 192}, "products", True),
        ({"head_dim": 192, "head_dim_v": 192, "long_scores": True}, "products", False),
        ({"head_dim": 160, "head_dim_v": 160, "long_scores": True}, "products", True),
        ({"head_dim": 192, "head_dim_v": 160, "mask_form": "tables"}, "products", False),
        ({"head_dim": 192, "head_dim_v": 192, "gradients": ((0, "sum"),)}, "columns", False),
        ({"head_dim": 192, "head_dim_v": 256}, "columns", False),
        ({"head_dim": 256, "head_dim_v": 256}, "columns", False),
    ],
    ids=str,
)
def test_what_warpgroups_share_out(changes: dict[str, object], split: str, keeps_k: bool) -> None:
    config = planned(replace(LIGHT, **changes)).config()  # type: ignore[arg-type]
    assert (config.split, config.keeps_k) == (split, keeps_k)


def test_what_warpgroups_share_out_of_few_tiles() -> None:
    narrow = replace(LIGHT, head_dim=64, head_dim_v=96)
    for problem, split in ((narrow, "keys"), (LIGHT, "columns")):
        assert planned(problem, sizes=FEW_TILES).config().split == split


def test_which_ctas_come_in_pairs() -> None:
    wide = replace(LIGHT, head_dim=192, head_dim_v=192)
    pair = planned(wide, 192)
    assert (pair.ctas, pair.tile, pair.split, pair.persistent) == (2, PAIR_TILE, "products", False)
    assert planned(replace(wide, head_dim=160, head_dim_v=160, long_scores=True), 192).ctas == 2
    assert planned(wide, 160).ctas == 1
    assert planned(replace(wide, lengths="used"), 192).ctas == 2
    ordered = planned(replace(wide, deterministic=True), 192)
    assert ordered.ctas == 2 and ordered.config().turn_rows == ordered.tile[0] // 2  # half of the columns
    assert planned(replace(wide, gradients=((0, "sum"),)), 192).ctas == 1
    assert planned(replace(wide, head_dim_v=64), 192).ctas == 1  # K of the other CTA is wider than V
    assert planned(LIGHT, 192).ctas == planned(replace(wide, head_dim_v=128), 192).ctas == 1


def test_a_pair_counts_as_one_where_groups_are_divided() -> None:
    wide = Problem(192, 192, grouped=True)
    inputs: Any = SimpleNamespace(extents=SimpleNamespace(heads=8), kv_heads=2, lengths="dense")
    alone, pair = (groups_of(inputs, planned(wide, paired)) for paired in (0, 192))
    assert alone is not None and pair is not None
    assert (alone.time.ctas, alone.time.tile[1]) == (1, 64)
    assert (pair.time.ctas, pair.time.tile[1]) == (2, 128)


def test_blocks_are_persistent_where_results_can_leave_by_tiles_of_dq() -> None:
    narrow = replace(LIGHT, head_dim=64, head_dim_v=64)
    assert planned(narrow).persistent and planned(replace(LIGHT, sloped=True)).persistent
    assert planned(LIGHT).persistent and planned(LIGHT).stages[2] == 1
    assert not planned(replace(narrow, head_dim_v=128)).persistent  # dV is wider
    ordered = replace(narrow, deterministic=True, mask_form="none")
    assert planned(ordered).persistent and planned(ordered).config().takes_first
    for changes in ({"mask_form": "tables"}, {"lengths": "packed"}, {"lengths": "used"}):
        assert not planned(replace(ordered, **changes)).persistent
    assert not planned(replace(ordered, gradients=((0, "sum"),))).persistent
    assert planned(replace(LIGHT, head_dim=192)).persistent
    assert not planned(replace(LIGHT, head_dim=192, lengths="packed")).persistent
    assert not planned(replace(LIGHT, head_dim=192, head_dim_v=192)).persistent
    assert planned(replace(LIGHT, head_dim=160, head_dim_v=160)).persistent
    assert not planned(replace(LIGHT, head_dim=160, head_dim_v=160, lengths="used")).persistent
    assert not planned(replace(narrow, long_scores=True)).persistent
    assert planned(replace(narrow, long_scores=True, brief=True)).persistent
    assert not planned(replace(LIGHT, head_dim=160, head_dim_v=160, long_scores=True, brief=True)).persistent
    assert planned(replace(narrow, gradients=((0, "sum"),))).persistent


def _shapes(config: Any, w: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(rows, columns) of a warpgroup's products for dQ, and their positions."""
    return list(zip(config.dq_shapes, config.dq_tiles(w), strict=True))


@pytest.mark.parametrize("rows", (80, 48, 32))
def test_eight_rows_of_transposed_dq_lie_together(rows: int) -> None:
    """Those past the end of a sequence are left out by adding up less of each part."""
    configs = [
        planned(p).config()
        for p in (LIGHT, replace(LIGHT, head_dim=192), replace(LIGHT, head_dim=192, mask_form="tables"))
    ]
    (config,) = (one for one in configs if one.tile_m == rows)
    for w in range(config.consumers):
        for first, (start, count), (height, columns) in zip(
            config.dq_rows(w), config.dq_numbers(w), config.dq_shapes, strict=True
        ):
            assert (height * columns, height % 8) == (count, 0)
            for n in range(count):
                assert config.dq_order.place(start + n)[0] // 8 == first // 8 + n // (8 * columns)


@pytest.mark.parametrize("mask_form", ["queries", "tables"])
@pytest.mark.parametrize("width", [*WIDTHS, (192, 128)], ids=str)
def test_warpgroups_share_out_dq(width: Width, mask_form: str) -> None:
    """Each element of a tile is one warpgroup's, which says where its numbers lie."""
    config = planned(Problem(*widths(width), mask_form=mask_form)).config()  # type: ignore[arg-type]
    found = []
    for w in range(config.consumers):
        assert config.dq_rows(w) == tuple(down * rows for (rows, _), (down, _) in _shapes(config, w))
        for ((rows, columns), (down, across)), (first, count) in zip(
            _shapes(config, w), config.dq_numbers(w), strict=True
        ):
            places = [config.dq_order.place(n) for n in range(first, first + count)]
            mine = product(
                range(down * rows, (down + 1) * rows), range(across * columns, (across + 1) * columns)
            )
            assert sorted(places) == list(mine)
            found += places
    assert sorted(found) == list(product(range(config.tile_m), range(config.head_dim)))


@pytest.mark.parametrize(
    ("changes", "stores"),
    [
        ({}, True),
        ({"head_dim": 40, "head_dim_v": 64}, True),
        ({"deterministic": True, "mask_form": "tables"}, True),
        ({"long_scores": True, "grouped": True, "gradients": ((0, "once"),)}, True),
        ({"head_dim": 192}, False),
        ({"head_dim": 160, "head_dim_v": 160}, False),
        ({"head_dim": 256, "head_dim_v": 256}, False),
    ],
    ids=str,
)
def test_blocks_with_all_keys_write_dq(changes: dict[str, object], stores: bool) -> None:
    """Keys are few, their tile holds them, and a warpgroup's part of dQ is one product's."""
    problem = replace(LIGHT, **changes)  # type: ignore[arg-type]
    assert not planned(problem, sizes=sizes_of(kv_len=129)).stores_dq
    plan = planned(problem, sizes=FEW_KEYS)
    config = plan.config()
    assert plan.stores_dq == config.stores_dq == stores
    assert ("dQ is written by the block" in plan.explain()) == stores
    if stores:
        ((rows, columns),) = config.dq_shapes
        assert config.tile_n >= 128 and rows * columns * 2 <= 4 * config.dq_room
    plan.check()


@pytest.mark.parametrize(
    ("changes", "clears"),
    [
        ({}, True),
        ({"grouped": True}, True),
        ({"mask_form": "tables"}, True),
        ({"head_dim": 192}, True),
        ({"mask_form": "none"}, False),
        ({"lengths": "packed"}, False),
        ({"lengths": "used"}, False),
        ({"deterministic": True}, False),
        ({"long_scores": True}, False),
        ({"head_dim": 160, "head_dim_v": 160}, False),
    ],
    ids=str,
)
def test_blocks_that_follow_each_other_clear_sums(changes: dict[str, Any], clears: bool) -> None:
    """Heads go in sections, and a block clears for another one that takes a tile after its own."""
    for few in (FEW_KEYS, FEW_STEPS, FEW_TILES):
        assert not planned(LIGHT, 192, few).clears
    plan = planned(replace(LIGHT, **changes), 192)
    assert plan.clears == plan.config().clears == clears
    assert ("sums of dQ are cleared" in plan.explain()) == clears
    plan.check()


@pytest.mark.parametrize(
    ("width", "tile", "depth", "added"),
    [
        (128, LONG_TILE, 8, [80 * 64] * 2),
        (112, LONG_TILE, 7, [80 * 64] * 2),
        (96, TILE, 6, [64 * 48] * 2),
        (80, TILE, 5, [64 * 48, 64 * 32]),
        (72, TILE, 5, [64 * 48, 64 * 24]),
        (40, ROOMY_TILE, 3, [64 * 40] * 2),
    ],
)
def test_what_heads_are_padded_with_is_left_out(
    width: int, tile: tuple[int, int], depth: int, added: list[int]
) -> None:
    """Depths of products along the width of heads, and of sums, where padding lies behind all else."""
    plan = planned(replace(LIGHT, head_dim=width, head_dim_v=width))
    config = plan.config()
    assert plan.tile == tile and config.depths == (depth, depth)
    assert [config.dq_added(w) for w in range(2)] == [(count,) for count in added]
    order = config.dq_order
    for w in range(2):
        ((start, count),), (kept,) = config.dq_numbers(w), config.dq_added(w)
        columns = {order.place(n)[1] for n in range(start, start + kept)}
        others = {order.place(n)[1] for n in range(start + kept, start + count)}
        assert max(columns) < -(-width // 8) * 8 or config.transposes_dq
        assert not others or min(others) >= width


@pytest.mark.parametrize(
    ("changes", "by_ds"),
    [
        ({}, True),
        ({"mask_form": "none"}, True),
        ({"head_dim": 96, "head_dim_v": 96}, False),
        ({"head_dim": 192}, False),
        ({"deterministic": True}, False),
    ],
    ids=str,
)
def test_dk_leaves_by_ds_where_dq_has_one_stage(changes: dict[str, Any], by_ds: bool) -> None:
    plan = planned(replace(LIGHT, **changes))
    config = plan.config()
    assert plan.dk_by_ds == config.dk_by_ds == by_ds
    if by_ds:
        assert plan.memory["ds"].size >= 2 * config.tile_n * config.head_dim
        assert planned(replace(LIGHT, **changes)).topology.overlaps.count(BY_DS) == 1
        assert not planned(replace(LIGHT, **changes), sizes=FEW_STEPS).dk_by_ds
    plan.check()


def test_where_pairs_read_elements_of_their_own() -> None:
    row, square, buckets = torch.zeros(8), torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.int64)
    mods: list[tuple[bool, Any]] = [
        (False, lambda s, b, h, q, k: s + row[q] * row[k]),
        (False, lambda s, b, h, q, k: s + square[h, q - k + 4]),
        (True, lambda s, b, h, q, k: s + square[q, k]),
        (True, lambda s, b, h, q, k: s + square[k // 2, q + 1]),
        (True, lambda s, b, h, q, k: s + row[buckets[q, k]]),
    ]
    for own, mod in mods:
        facts = fa4flex.compile(score_mod=mod).prepared.engine.facts
        assert any(map(read_by_pairs, nodes(facts.score))) == own
