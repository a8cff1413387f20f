"""Plans of the Hopper backward: tiles and stages by what a problem takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers import Width, widths

import fa4flex
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.hoist import read_by_pairs
from fa4flex.codegen.expr import nodes
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import SM90A
from fa4flex.kernels.bwd_sm90.plan import (
    LATENT_TILE,
    LONG_LATENT_TILE,
    LONG_TILE,
    ROOMY_TILE,
    TILE,
    WIDE_TILE,
    HopperBackwardPlan,
)
from fa4flex.kernels.dispatch import plan_backward

WIDTHS = (32, 64, 80, 96, 128, 192, 256)
LIGHT = Problem(128, 128, mask_form="queries")


def planned(problem: Problem) -> HopperBackwardPlan:
    plan = plan_backward(Facts(), problem, SM90A)
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
        ({"head_dim": 160}, LONG_LATENT_TILE),
    ],
    ids=str,
)
def test_queries_of_a_step(changes: dict[str, object], tile: tuple[int, int]) -> None:
    assert planned(replace(LIGHT, **changes)).tile == tile  # type: ignore[arg-type]


def test_blocks_are_persistent_where_results_can_leave_by_tiles_of_dq() -> None:
    narrow = replace(LIGHT, head_dim=64, head_dim_v=64)
    assert planned(narrow).persistent and planned(replace(LIGHT, sloped=True)).persistent
    assert planned(LIGHT).persistent and planned(LIGHT).stages[2] == 1
    assert not planned(replace(narrow, head_dim_v=128)).persistent  # dV is wider
    assert not planned(replace(narrow, deterministic=True)).persistent
    assert planned(replace(LIGHT, head_dim=192)).persistent
    assert not planned(replace(LIGHT, head_dim=192, lengths="packed")).persistent
    assert not planned(replace(LIGHT, head_dim=192, head_dim_v=192)).persistent
    assert not planned(replace(narrow, long_scores=True)).persistent
    assert planned(replace(narrow, gradients=((0, "sum"),))).persistent


@pytest.mark.parametrize("mask_form", ["queries", "tables"])
@pytest.mark.parametrize("width", [*WIDTHS, (192, 128)], ids=str)
def test_warpgroups_share_out_dq(width: Width, mask_form: str) -> None:
    """Each element of a tile is one warpgroup's, which says where its numbers lie."""
    config = planned(Problem(*widths(width), mask_form=mask_form)).config()  # type: ignore[arg-type]
    found = []
    for w in range(config.consumers):
        dealt = zip(config.dq_shapes, config.dq_tiles(w), config.dq_numbers(w), strict=True)
        for (rows, columns), (down, across), (first, count) in dealt:
            places = [config.dq_order.place(n) for n in range(first, first + count)]
            mine = product(
                range(down * rows, (down + 1) * rows), range(across * columns, (across + 1) * columns)
            )
            assert sorted(places) == list(mine)
            found += places
    assert sorted(found) == list(product(range(config.tile_m), range(config.head_dim)))


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
