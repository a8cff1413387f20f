"""Plans of the Hopper forward kernel of codes: what it accepts, what fits, and its pipeline in any order of
events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels import dispatch
from fa4flex.kernels.fwd_8bit_sm90.plan import FWD_8BIT_SM90, LOST, CodesPlan
from fa4flex.kernels.fwd_sm90.plan import FWD_SM90
from fa4flex.kernels.plan.keys import CONTIGUOUS, TILE, Codes, of_codes
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A
from fa4flex.primitives.heads import Shares
from fa4flex.primitives.schedule import Schedule

FACTS = fa4flex.compile().program.facts
E4M3, INT8 = (Codes(qk, "float8_e4m3fn", True, True) for qk in ("float8_e4m3fn", "int8"))
HALF = Codes("int8", "bfloat16", True)


def problem_of(codes: Codes, d: int = 128, dv: int = 128, **others: Any) -> Problem:
    return Problem(d, dv, dtype=codes.qk, keys=of_codes(codes), **others)


def planned(problem: Problem, schedule: Schedule = Schedule(), rows: int = 5000) -> CodesPlan:
    plan = plan_forward(FACTS, problem, SM90A, schedule, sizes=sizes_of(rows))
    assert isinstance(plan, CodesPlan)
    return plan


def test_no_other_kernel_takes_codes_and_it_takes_nothing_else() -> None:
    for rows in (1, 16, 5000):
        for codes in (E4M3, INT8, HALF):
            chosen = dispatch.choose("forward", problem_of(codes), SM90A, sizes_of(rows))
            assert chosen is FWD_8BIT_SM90
    numbers = replace(problem_of(INT8), dtype="bfloat16", keys=CONTIGUOUS)
    assert dispatch.choose("forward", numbers, SM90A, sizes_of()) is FWD_SM90
    for problem, target in (
        (problem_of(INT8, skip=0.1), SM90A),
        (problem_of(INT8, dropout=True), SM90A),
        (problem_of(INT8, weights="elementwise"), SM90A),
        (problem_of(INT8, shares=Shares(2, 1)), SM90A),
    ):
        with pytest.raises(UnsupportedError, match="codes"):
            dispatch.choose("forward", problem, target, sizes_of())


@pytest.mark.parametrize("wrong", ["bfloat16", "float8_e4m3fn"])
def test_queries_are_of_the_dtype_of_their_codes(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="dtype"):
        replace(problem_of(INT8), dtype=wrong)


@pytest.mark.parametrize("codes", [E4M3, INT8, HALF, replace(E4M3, promote=False)], ids=str)
@pytest.mark.parametrize("d, dv", [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_every_width_has_a_plan(codes: Codes, d: int, dv: int) -> None:
    for lengths in ("dense", "used", "packed"):
        plan = planned(problem_of(replace(codes, packed=lengths == "packed"), d, dv, lengths=lengths))
        config = plan.config()
        assert TILE % plan.tiles.tile_n == 0, "a tile has one scale"
        assert config.depth == d // (16 if codes.qk == "bfloat16" else 32)
        assert plan.rescale_threshold == (0.0 if codes.transposed else 8.0)
        assert plan.need.total <= plan.registers.consumer
        assert config.promote == (codes.transposed and codes.promote)
        assert config.parts * config.apart == config.head_dim_v
        assert config.parts == 1 or dv > 128 or config.head_dim_v == 64
        size = plan.memory["v"].size
        assert size == plan.tiles.tile_n * plan.tiles.head_dim_v * plan.kv_stages * (
            1 if codes.transposed else 2
        )


def test_a_bound_of_errors_is_told() -> None:
    """Four instructions of 32 keys: each loses at most what 34 terms lose behind 13 fraction bits."""
    plan = planned(problem_of(E4M3))
    assert plan.sure_error == pytest.approx(128 / 32 * LOST) and pytest.approx(34 / 2**13) == LOST
    text = plan.explain()
    assert "q.k of float8_e4m3fn" in text and "0.0166" in text
    assert "promote" in planned(problem_of(replace(E4M3, promote=False))).explain()
    assert planned(problem_of(HALF)).sure_error == 0.0
    assert "summed as int32" in fa4flex.compile().source("plan", qk="int8", q_len=4096, kv_len=4096)


def test_tiles_of_several_scales_and_large_thresholds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="share a scale"):
        planned(problem_of(INT8), Schedule(tile=(128, 96)))
    assert planned(problem_of(INT8), Schedule(tile=(64, 64))).tile == (64, 64)
    with pytest.raises(UnsupportedError, match="overflow"):
        plan_forward(FACTS, problem_of(INT8), SM90A, rescale_threshold=1.0, sizes=sizes_of())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"qk": "int8", "page_rows": 64}, "page_rows=64 beside codes"),
        ({"latent": True, "kv_dtype": "float8_e4m3fn"}, "kv_dtype='float8_e4m3fn' beside latent rows"),
        ({"qk": "int9"}, "qk='int9'"),
    ],
)
def test_explanations_refuse_what_they_would_ignore(given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        str(fa4flex.compile().explain(256, 256, arch="sm_90a", **given))


def test_formats_that_no_kernel_multiplies_have_no_plan() -> None:
    told = str(fa4flex.compile().explain(256, 256, arch="sm_90a", qk="mxfp8"))
    assert "no kernel: qk='mxfp8'" in told
