"""Plans of the Hopper backward: tiles and stages by what a problem takes; the kernel's pipeline, proved and
broken."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from barrier_counts import counts_of
from blackwell_plans import broken, dropped, edges, fault_of, find, moved, ordered, with_role, wrong_counts
from checked_plans import plan_backward, sizes_of
from helpers import Width, widths

import fa4flex
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.hoist import read_by_pairs
from fa4flex.codegen.expr import nodes
from fa4flex.kernels.bwd_sm90 import plan as planner
from fa4flex.kernels.bwd_sm90 import roles
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
    HopperBackwardPlan,
)
from fa4flex.kernels.plan.groups import groups_of
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM90A
from fa4flex.kernels.plan.topology import Event, Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace

WIDTHS = (32, 64, 80, 96, 128, 192, 256)
LIGHT = Problem(128, 128, mask_form="queries")


LARGE = sizes_of()
FEW_KEYS, FEW_STEPS = sizes_of(kv_len=128), sizes_of(512)
FEW_TILES = sizes_of(kv_len=33 * 128, heads=2)
"""33 tiles of each head: half of the multiprocessors are 66."""


def planned(problem: Problem, paired: int = 0, sizes: Sizes = LARGE) -> HopperBackwardPlan:
    """The plan where CTAs come in pairs for heads up to `paired` wide."""
    with patch.object(planner, "PAIRED", paired):
        plan = plan_backward(Facts(), problem, SM90A, sizes=sizes)
    assert isinstance(plan, HopperBackwardPlan)
    return plan


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


# --- the pipeline --------------------------------------------------------------------------------------

NARROW = Problem(64, 64)
KINDS = {
    "two stages of dQ": NARROW,
    "one stage of dQ": Problem(128, 128),
    "sums cleared": Problem(64, 64, mask_form="queries"),
    "sums cleared, one stage of dQ": LIGHT,
    "a block per tile": Problem(64, 64, long_scores=True),
    "ordered sums": Problem(64, 64, deterministic=True),
    "ordered sums, one stage of dQ": Problem(128, 128, deterministic=True),
    "copies of dS": Problem(64, 64, deterministic=True, gradients=((0, "once"),)),
    "dQ stored": Problem(128, 128),
    "few tiles": Problem(64, 64),
    "few tiles, columns": Problem(128, 128),
    "columns": Problem(256, 256),
    "products": Problem(192, 192),
    "products, K in shared memory": Problem(192, 192, long_scores=True),
    "persistent products": Problem(160, 160),
    "products of pairs": Problem(192, 192),
}
KIND = pytest.mark.parametrize("kind", KINDS)


PAIRS = "products of pairs"
BY_DS = ("dK rows 0", "shared dS 0")
"""Overlaps where dK leaves by the memory of dS."""


SIZES = {"dQ stored": FEW_KEYS, "few tiles": FEW_TILES, "few tiles, columns": FEW_TILES}
"""Sizes of kinds that these decide."""


def of_kind(kind: str) -> HopperBackwardPlan:
    return planned(KINDS[kind], 192 * (kind == PAIRS), SIZES.get(kind, LARGE))


@cache
def sound(kind: str) -> Topology:
    return of_kind(kind).topology


@pytest.mark.parametrize("width", [64, 96, 192, 256])
def test_ragged_batches_have_the_pipeline_of_dense_ones(width: int) -> None:
    """TMA ends what ends within a tile."""
    for paired in (0, 192):
        dense, packed, used = (
            planned(Problem(width, width, lengths=lengths), paired).topology  # type: ignore[arg-type]
            for lengths in ("dense", "packed", "used")
        )
        assert dense == packed == used


def works_of(pipeline: Topology) -> tuple[list[int], ...]:
    """Steps of the tiles of keys that a block takes: few and many, more than rings hold, and none."""
    return ([1], [5], [0]) if pipeline.one_tile else ([1, 0, 5, 2], [0, 3])


@pytest.mark.parametrize("width", WIDTHS)
def test_every_pipeline_runs(width: int, seed: int) -> None:
    for i, width_v in enumerate(WIDTHS):
        for more in ({}, {"lengths": "used", "mask_form": "tables"}, {"gradients": ((0, "once"),)}):
            plan = planned(Problem(width, width_v, **more))  # type: ignore[arg-type]
            plan.check()
            for works in works_of(plan.topology):
                assert simulate(plan.topology, works, at_random(seed + i)) > 0


@KIND
def test_one_run_stands_for_all(kind: str, seed: int) -> None:
    pipeline = sound(kind)
    for works in works_of(pipeline):
        first = edges(trace(pipeline, works, round_robin()))
        assert len(first) > 20 and edges(trace(pipeline, works, at_random(seed))) == first


@pytest.mark.parametrize(
    ("kind", "role", "order"),
    [
        ("two stages of dQ", "consumer 1", "S dP dV dQ dK"),
        ("columns", "consumer 1", "S dP dV dK dQ"),
        ("products", "consumer 0", "S dV dQ"),
        ("products", "consumer 1", "dP dQ dK"),
        ("products of pairs", "consumer 0", "S dV"),
    ],
)
def test_products_are_issued_in_the_stated_order(kind: str, role: str, order: str) -> None:
    events = sound(kind).role(role).run([2])
    issued = [e.target for e in events if e.action == "issue"]
    assert issued == order.split() * 2
    finished = [e.target for e in events if e.action == "finish"]
    assert finished == order.split() * 2


@KIND
def test_counts_are_the_kernels(kind: str) -> None:
    plan = of_kind(kind)
    config, pipeline = plan.config(), plan.of_one_cta
    table = roles.barrier_table(config)
    counts = counts_of(table) | (counts_of(table, 1) if config.ctas > 1 else {})
    assert counts == arrivals_of(plan.topology)
    unused = 0 if plan.persistent else 3  # of K and V, and of the next tile's number
    assert pipeline.mbarrier_count + unused == table.count
    numbers = {n: b.name for b in pipeline.barriers for n in b.numbers}
    for w, stage in product(range(config.dq_parts), range(config.dq_stages)):
        part = f" {w}" if config.ctas == 1 else ""
        assert numbers[roles.DQ_FULL.at(w, stage)] == f"dq_full{part}"
        assert numbers[roles.DQ_EMPTY.at(w, stage)] == f"dq_empty{part}"
    assert all(numbers[roles.STORED.at(w)] == f"stored {w}" for w in range(config.consumers))
    assert max(numbers) < SM90A.named_barriers and len(numbers) == sum(b.stages for b in pipeline.barriers)
    assert plan.memory["dq"].size == 4 * config.dq_room * config.dq_parts * config.dq_stages
    for ring, statistic in (("q", "lse2"), ("dout", "delta")):
        assert pipeline.ring(ring).beside == ((statistic, 4 * config.tile_m),)


def test_barriers_that_the_kernel_does_not_have_are_not_missing() -> None:
    for kind in ("two stages of dQ", "one stage of dQ", "columns"):
        run = trace(sound(kind), [6], round_robin())
        for w, by, j in product((0, 1), (0, 1), (0, 1, 2)):
            assert ordered(run, f"consumer {by} finish dQ tile {j}", f"write shared dS {w} tile {j + 2}")
            assert ordered(run, f"the store of dq {w} tile {j}", f"write dq {w} tile {j + 2}")


def test_shown_probabilities_are_read_before_the_next_ones_are_written() -> None:
    """P has one stage, without a barrier of its own; and K and V are in registers before dK and dV take their
    places in shared memory."""
    run = trace(sound("products"), [6], round_robin())
    for j in range(5):
        assert ordered(run, f"consumer 0 write shared P 0 tile {j}", f"consumer 1 read shared P 0 tile {j}")
        assert ordered(run, f"read shared P 0 tile {j}", f"write shared P 0 tile {j + 1}")
    for j in range(4):
        assert ordered(run, f"consumer 0 finish dQ tile {j}", f"write shared dS 1 tile {j + 2}")
    assert ordered(run, "consumer 1 read v tile 0", "consumer 0 write dV rows 0 tile 0")
    assert ordered(run, "consumer 0 finish dQ tile 5", "consumer 1 write dK rows 1 tile 0")


def test_what_the_other_cta_sends_is_read_before_the_next_one_comes() -> None:
    """Its dS has two stages, and dQ of a step is multiplied in the next one; other keys come where V was."""
    run = trace(sound(PAIRS), [6], round_robin())
    for c, other in (("", " there"), (" there", "")):
        for j in range(4):
            read = f"consumer 1{c} finish dQ{c} tile {j}"
            assert ordered(run, read, f"exchange{other} load ds_peer{c} tile {j + 2}")
            assert ordered(run, read, f"consumer 1{c} write shared dS{c} tile {j + 2}")
            assert ordered(run, f"consumer 1{c} read shared P{c} tile {j}", f"write shared P{c} tile {j + 1}")
        assert ordered(run, f"consumer 1{c} read v{c} tile 0", f"exchange{c} load k_peer{c} tile 0")
        assert ordered(run, f"consumer 1{c} finish dQ{c} tile 5", f"write dV rows{c} tile 0")


@KIND
def test_every_dropped_event_is_found(kind: str) -> None:
    pipeline = sound(kind)
    works = works_of(pipeline)
    assert not broken(pipeline, *works)
    # Where warpgroups do not share out products, they do the same; and so do CTAs of a pair.
    alike = () if "products" in kind else ("consumer 1",)
    alike += tuple(role.name for role in pipeline.roles if role.cta)
    every = [x for x in dropped(pipeline, *alike) if matters(*x[:2], kind)]
    assert len(every) > 70
    for event, where, less in every:
        assert broken(less, *works), f"{event} of {where}"


def matters(event: Event, where: str, kind: str) -> bool:
    """True if the simulation finds one less. Warps of a warpgroup, which gather at `stored`, or at `scores`
    where there is one, are one role here; what comes for nothing is said to be read, and others read the next
    number, too. A drain is followed by others: see below. What is announced is part of what the other CTA
    sends here, and dS is read as it is sent. Where products are shared out, the second warpgroup reads K
    after it has met the first one, which has waited, too; and so do both where dK leaves by the memory of dS,
    for which they meet when K and V have come."""
    told = event.action, event.target
    alone = ("scores",) * (kind == "few tiles")
    gathers = event.action == "sync" and event.target.startswith(("stored", *alone))
    read = told in (("read", "k"), ("read", "v"), ("read", "next"), ("store", "shared dS 0"))
    others = "k" if "products" in kind else "kv" if BY_DS in sound(kind).overlaps else ""
    by = "consumer" if "v" in others else "consumer 1"
    spare = event.action == "wait" and event.target in others and where.startswith(by)
    sent = told == ("read", "shared dS")
    spare = spare or sent or event.action in ("drain", "announce")
    return not gathers and not read and not spare


@KIND
def test_memory_is_not_overwritten_while_it_is_stored(kind: str) -> None:
    """Without the drains of a step, or of what is staged for global memory."""
    pipeline = sound(kind)
    for name in ("writer", "consumer 0"):
        role = pipeline.role(name)
        parts = {when: tuple(e for e in part if e.action != "drain") for when, part in role.parts.items()}
        if any(e.action == "drain" for e in role.events):
            less = with_role(pipeline, replace(role, **parts))  # type: ignore[arg-type]
            assert "the store of" in broken(less, *works_of(pipeline))


@KIND
def test_wrong_counts_are_found(kind: str) -> None:
    pipeline = sound(kind)
    wrong = wrong_counts(pipeline)
    assert len(wrong) >= 12
    assert all(broken(one, *works_of(pipeline)) for one in random.sample(wrong, 8))


# kind, role, part, event, the event to whose place it goes, and what is said
MOVED = (
    # used before it is there
    ("two stages of dQ", "consumer 0", "body", "issue dQ", "sync scores", "shared dS 1 tile . before"),
    ("columns", "consumer 0", "body", "issue dV", "sync scores", "shared P 1 tile . before it is there"),
    ("products", "consumer 1", "body", "read shared P 0", "take weighed", "shared P 0 tile . before it is"),
    ("products", "consumer 0", "body", "issue dQ", "sync scores", "shared dS 1 tile . before it is there"),
    ("one stage of dQ", "consumer 1", "body", "issue S", "wait q", "q tile . before it is there"),
    ("one stage of dQ", "consumer 1", "first", "issue dP", "wait k", "v tile 0 before it is there"),
    ("two stages of dQ", "writer", "body", "store dq 0", "take dq_full 0", "dq 0 tile . before it is there"),
    ("two stages of dQ", "consumer 0", "body", "read dQ of 0", "finish dQ", "dQ of 0 tile . before it is"),
    ("two stages of dQ", "consumer 0", "body", "give dq_full 0", "write dq 0", "dq 0 tile . before it is"),
    # overwritten before it is read
    ("two stages of dQ", "consumer 0", "body", "release dout", "finish dV", "frees dout tile . in use"),
    ("two stages of dQ", "consumer 0", "body", "release q", "finish dK", "frees q tile . in use"),
    ("one stage of dQ", "writer", "body", "give dq_empty 0", "drain dq 0", "the store of dq 0 .* may still"),
    ("two stages of dQ", "consumer 0", "body", "write dq 0", "take dq_empty 0", "while the store of dq 0"),
    ("one stage of dQ", "consumer 0", "last", "write dV rows 0", "take dq_read 0", "while the store of dq 0"),
    ("one stage of dQ", "consumer 0", "last", "write dK rows 0", "sync scores", "multiply shared dS"),
    ("two stages of dQ", "consumer 0", "last", "write dK rows 0", "take dq_empty 0", "store of dq 0"),
    (
        "persistent products",
        "consumer 0",
        "last",
        "write dV rows 0",
        "take dq_read 0",
        "nobody has read dq 0",
    ),
    ("columns", "consumer 0", "body", "release q", "sync scores", "q tile . while the product dK tile ."),
    ("columns", "consumer 0", "last", "write dK rows 0", "sync scores", "while the product dQ .* multiply k"),
    ("products", "consumer 0", "body", "give weighed", "write shared P 0", "shared P 0 tile . before it is"),
    ("products", "consumer 1", "body", "read shared P 0", "sync scores", "shared P 0"),
    (
        "products",
        "consumer 1",
        "last",
        "write dK rows 1",
        "sync scores",
        "while the product dQ .* multiply k",
    ),
    (PAIRS, "consumer 1", "body", "issue dQ", "wait ds_peer", "ds_peer tile . before it is there"),
    (PAIRS, "consumer 1", "body", "release ds_peer", "finish dQ", "frees ds_peer tile . in use"),
    (
        PAIRS,
        "exchange",
        "body",
        "read shared dS",
        "take ds_shared",
        "shared dS tile . before it is there",
    ),
    (
        PAIRS,
        "exchange",
        "first",
        "load k_peer",
        "await v_kept",
        "v tile 0 while the copy of k_peer tile 0|v tile 0 before",
    ),
    ("two stages of dQ", "producer", "first", "load v", "await keys_empty", "v full|v tile . while"),
)


@pytest.mark.parametrize("case", MOVED, ids=lambda case: f"{case[1]}: {case[3]}, {case[0]}")
def test_an_event_out_of_place_is_named(case: tuple[str, ...]) -> None:
    kind, role, when, event, other, words = case
    pipeline = sound(kind)
    at, to = (find(pipeline, role, when, wanted) for wanted in (event, other))
    wrong = moved(pipeline, role, when, at, to)
    assert re.search(words, fault_of(wrong, *works_of(pipeline))), fault_of(wrong, *works_of(pipeline))


def test_a_deadlock_names_who_waits_for_what() -> None:
    pipeline = sound("two stages of dQ")
    role = pipeline.role("consumer 0")
    body = tuple(e for e in role.body if e.target != "dq_full 0")
    fault = fault_of(with_role(pipeline, replace(role, body=body)), [5])
    assert re.match("deadlock: .*writer: take dq_full 0 tile 1", fault), fault


def test_graph_and_words() -> None:
    plan = planned(NARROW)
    graph = plan.topology.graph
    assert graph.edges["producer", "q"] == {"full": 1, "bytes": 128 * 64 * 2 + 4 * 128}
    assert graph.edges["consumer 1", "keys_empty"] == {"arrivals": 4}
    assert graph.edges["consumer 0", "dq_full 0"] == graph.edges["dq_empty 0", "consumer 0"]
    assert graph.nodes["dq_full 1"] == {"kind": "barrier", "number": 3, "threads": 160}
    for words in ("k: 1 stage of 16384 B; full after 1 arrival and 16384 B, freed by keys_empty", "writer:"):
        assert words in plan.explain()
