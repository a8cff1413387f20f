"""Plans of the Blackwell forward kernel of codes: what it accepts, what fits, and its pipeline in any order
of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.errors import UnsupportedError
from fa4flex.kernels import dispatch
from fa4flex.kernels.fwd_8bit_sm100.config import HEADROOM, RESCALE
from fa4flex.kernels.fwd_8bit_sm100.plan import FWD_8BIT_SM100, CodesPlan
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import CONTIGUOUS, TILE, Codes, of_codes
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM100A, SM103A, Target
from fa4flex.kernels.plan.topology import Event
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.heads import Shares

FACTS = fa4flex.compile().program.facts
E4M3, INT8 = (Codes(qk, "float8_e4m3fn", True, True) for qk in ("float8_e4m3fn", "int8"))
HALF = Codes("int8", "bfloat16", True)
LARGEST = 448.0
"""Largest number of e4m3."""

WORKS: tuple[list[int], ...] = ([], [1], [9], [1, 9], [9, 1, 9, 1], [1, 1, 1, 1], [4, 1, 3])
"""Key tiles of each work tile that a CTA takes."""


def problem_of(codes: Codes, d: int = 128, dv: int = 128, **others: Any) -> Problem:
    return Problem(d, dv, dtype=codes.qk, keys=of_codes(codes), **others)


def planned(problem: Problem, rows: int = 5000, target: Target = SM100A, **more: Any) -> CodesPlan:
    plan = plan_forward(FACTS, problem, target, sizes=sizes_of(rows), **more)
    assert isinstance(plan, CodesPlan)
    return plan


def test_no_other_kernel_takes_codes_and_it_takes_nothing_else() -> None:
    for rows in (1, 16, 5000):
        for codes in (E4M3, INT8, HALF):
            chosen = dispatch.choose("forward", problem_of(codes), SM100A, sizes_of(rows))
            assert chosen is FWD_8BIT_SM100
    numbers = replace(problem_of(INT8), dtype="bfloat16", keys=CONTIGUOUS)
    assert dispatch.choose("forward", numbers, SM100A, sizes_of()) is FWD_SM100
    assert dispatch.choose("forward", problem_of(E4M3), SM103A, sizes_of()) is FWD_8BIT_SM100
    for problem, target in (
        (problem_of(INT8), SM103A),
        (problem_of(HALF), SM103A),
        (problem_of(E4M3, 256, 256), SM100A),
        (problem_of(INT8, skip=0.1), SM100A),
        (problem_of(INT8, dropout=True), SM100A),
        (problem_of(INT8, weights="elementwise"), SM100A),
        (problem_of(INT8, shares=Shares(2, 1)), SM100A),
    ):
        with pytest.raises(UnsupportedError, match="codes"):
            dispatch.choose("forward", problem, target, sizes_of())


CASES = [
    (codes, d, dv, lengths)
    for codes in (E4M3, INT8, HALF)
    for d, dv in ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128))
    for lengths in ("dense", "used", "packed")
]


@pytest.mark.parametrize(("codes", "d", "dv", "lengths"), CASES, ids=str)
def test_every_width_has_a_plan(codes: Codes, d: int, dv: int, lengths: Any, seed: int) -> None:
    codes = replace(codes, packed=lengths == "packed")
    for rows in (100, 5000):
        plan = planned(problem_of(codes, d, dv, lengths=lengths), rows)
        tiles, config = plan.tiles, plan.config()
        assert tiles.tile_n == TILE, "a tile has one scale"
        assert config.depth == -(-d // 32) and config.pv == codes.pv
        size = tiles.tile_n * tiles.head_dim_v // tiles.ctas * tiles.kv_stages[1]
        assert plan.memory["v"].size == size * (1 if codes.transposed else 2)
        assert config.clears == (lengths != "dense" and not codes.transposed)
        columns = {r.name: r for r in plan.columns.ranges}
        p = columns["P 0 early"].count + columns["P 0 late"].count
        assert p == tiles.tile_n // (4 if codes.transposed else 2)
        check_counts(plan.topology)
        for i, work in enumerate(WORKS):
            order = round_robin() if i % 2 else at_random(seed + i)
            assert simulate(plan.topology, work, order) > 0


def test_probabilities_stay_below_the_largest_number() -> None:
    assert 2 ** (HEADROOM + RESCALE) <= LARGEST
    for codes in (E4M3, INT8):
        assert planned(problem_of(codes)).rescale_threshold == RESCALE
        with_maxima = planned(problem_of(codes, statistics=("lse", "max_scores")))
        assert with_maxima.rescale_threshold == 0.0
        with pytest.raises(UnsupportedError, match="e4m3"):
            replace(planned(problem_of(codes)), rescale_threshold=5.0).check_resources()
    assert planned(problem_of(HALF)).rescale_threshold == 8.0


def test_a_wait_less_is_found() -> None:
    """Without the wait for probabilities, products of values read what is not there."""
    topology = planned(problem_of(E4M3, mask_form="none", lengths="used")).topology
    multiply = next(role for role in topology.roles if role.name == "multiply")
    late = Event("await", "p_late 0", -1)
    assert late in multiply.body
    body = tuple(event for event in multiply.body if event != late)
    roles = tuple(replace(r, body=body) if r is multiply else r for r in topology.roles)
    with pytest.raises(PlanError):
        simulate(replace(topology, roles=roles), [9], round_robin())


def test_explanations() -> None:
    text = str(fa4flex.compile().explain(4096, 4096, arch="sm_100a", qk="int8"))
    assert "products: q.k of int8, summed as int32; P v of float8_e4m3fn, as float32" in text
    told = str(fa4flex.compile().explain(4096, 4096, arch="sm_103a", qk="int8"))
    assert "no kernel" in told and "int8" in told
    e4m3 = str(fa4flex.compile().explain(4096, 4096, arch="sm_103a", qk="float8_e4m3"))
    assert "q.k of float8_e4m3fn, summed as float32" in e4m3
