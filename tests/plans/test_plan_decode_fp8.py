"""Plans of the Hopper kernel for few query rows over an e4m3 cache: what it accepts, what fits, and its
pipeline in any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from broken_graphs import is_red, with_role
from checked_plans import plan_forward, sizes_of
from test_plan_decode import RUNS

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.errors import InputError
from fa4flex.kernels import dispatch
from fa4flex.kernels.decode_fp8_sm90.config import KEYS, WARPS
from fa4flex.kernels.decode_fp8_sm90.plan import DECODE_FP8_SM90, WIDEST, DecodePlan
from fa4flex.kernels.decode_fp8_sm90.topology import decode_topology
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import CONTIGUOUS, eight_bit
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule

FACTS = fa4flex.compile().program.facts
FEW = Problem(128, 128, keys=eight_bit(0, "head", "head"))


def planned(problem: Problem, schedule: Schedule = Schedule(), rows: int = 16) -> DecodePlan:
    plan = plan_forward(FACTS, problem, SM90A, schedule, sizes=sizes_of(rows))
    assert isinstance(plan, DecodePlan)
    return plan


def test_no_other_kernel_takes_a_cache_and_it_takes_nothing_else() -> None:
    assert dispatch.choose("forward", FEW, SM90A, sizes_of(16)) is DECODE_FP8_SM90
    other = dispatch.choose("forward", replace(FEW, keys=CONTIGUOUS), SM90A, sizes_of(16))
    assert other is not DECODE_FP8_SM90
    for problem, target, rows in (
        (FEW, SM90A, 65),
        (replace(FEW, mask_form="tables"), SM90A, 16),
        (replace(FEW, lengths="packed"), SM90A, 16),
        (FEW, SM100A, 16),
    ):
        with pytest.raises(
            fa4flex.UnsupportedError, match=r"e4m3 keys and values, k scaled by head and v(.|\n)*dequantised"
        ):
            dispatch.choose("forward", problem, target, sizes_of(rows))
    with pytest.raises(fa4flex.UnsupportedError, match="8-bit cache, with tiles"):
        planned(FEW, Schedule(tile=(64, 64)))


@pytest.mark.parametrize("wrong", [{"kv_dtype": "float8_e5m2"}, {"k_scales": "row"}])
def test_problems_are_checked(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=name):
        replace(FEW, keys=replace(FEW.keys, **{name.removeprefix("kv_"): wrong[name]}))  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 4, 7, 64])
def test_rows_have_classes(group: int) -> None:
    """The launch of one call serves others of its class, and no others."""

    def rows(q_len: int) -> int:
        inputs = Inputs(Shape(2, 2 * group, q_len, 500), 2, 64, 64, keys=eight_bit(0))
        sizes, problem = Sizes(inputs), Problem(64, 64, keys=eight_bit(0))
        if dispatch.accepting("forward", problem, SM90A, sizes) is not None:
            dispatch.plan_forward(FACTS, problem, SM90A, sizes=sizes)
        reach = sizes.valid
        assert reach.holds((2, q_len, 500))
        held = [n for n in range(1, 70) if reach.holds((2, n, 500))]
        classes = {next((c for c in (16, 32, 64) if n * group <= c), 0) for n in held}
        assert len(classes) == 1, "one kernel for all of them"
        return classes.pop()

    for q_len in (1, 2, 4, 5, 9, 16, 17, 64, 65):
        assert rows(q_len) == next((c for c in (16, 32, 64) if q_len * group <= c), 0)


@pytest.mark.parametrize("d, dv", [*((d, d) for d in range(8, 257, 8)), (192, 128), (64, 256)])
def test_every_width_has_a_plan_up_to_the_widest(d: int, dv: int) -> None:
    for rows, per, lengths in product((16, 32, 64), ("", "head", "token"), ("dense", "used")):
        keys = eight_bit(0, per, per)  # type: ignore[arg-type]
        problem = replace(FEW, head_dim=d, head_dim_v=dv, lengths=lengths, keys=keys)  # type: ignore[arg-type]
        if max(d, dv) > WIDEST[rows > 16, per == "token"]:
            with pytest.raises(fa4flex.UnsupportedError):
                planned(problem, rows=rows)
            continue
        plan = planned(problem, rows=rows)
        config = plan.config()
        assert plan.kv_stages >= 2 and config.head_dim >= d
        assert (
            config.steps * config.key_warps * KEYS == plan.tile_n and config.key_warps * rows // 16 == WARPS
        )
        in_flight = plan.blocks * (plan.memory["k"].size + plan.memory["v"].size)
        assert in_flight >= 140 << 10, "less than what a multiprocessor's share of the memory needs"


def test_a_plan_that_does_not_hold_is_refused() -> None:
    plan = planned(FEW)
    for wrong in (
        replace(plan, kv_stages=plan.kv_stages + 1),
        replace(plan, blocks=3),
        replace(plan, registers=replace(plan.registers, consumer=240)),
        replace(plan, tile_n=64),
        replace(plan, rescale_threshold=9.0),
    ):
        with pytest.raises((PlanError, fa4flex.UnsupportedError)):
            wrong.check()


def test_it_is_explained() -> None:
    text = planned(FEW).explain()
    assert "over an 8-bit cache" in text and "16 rows, x 128 keys" in text
    assert "every 4th part of the keys" in text and "e4m3 becomes float16 in registers" in text
    sizes = {"q_len": 1, "kv_len": 600, "heads": 8, "kv_heads": 2}
    assert "over an 8-bit cache" in fa4flex.compile().source("plan", kv_dtype="float8_e4m3fn", **sizes)
    assert "all keys of a tile" in planned(replace(FEW, head_dim=64, head_dim_v=64), rows=64).explain()
    paged = replace(FEW, lengths="used", keys=eight_bit(32, "page"))
    text = planned(paged).explain()
    assert "brought in 4 x 32 keys" in text and "k scaled by page" in text
    assert "4 warps copy rows" in planned(replace(paged, keys=eight_bit(8, "page"))).explain()


# --- the pipeline -------------------------------------------------------------------------------------


def sound(several: bool = True, stages: int = 2) -> Topology:
    return decode_topology(128, 64, 128, stages, several, TileCopies(128))


def test_it_runs_in_any_order(seed: int) -> None:
    for several, stages, tiles in product((True, False), (1, 2, 3), (1, 2, 7)):
        pipeline = sound(several, stages)
        check_counts(pipeline)
        for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
            simulate(pipeline, [tiles], pick)


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits, releases or loads, the pipeline fails its checks or some run."""
    for pipeline in (sound(True), sound(False)):
        for role in pipeline.roles:
            for part in ("first", "body"):
                for i, event in enumerate(getattr(role, part)):
                    if event.action in ("acquire", "wait", "release", "load"):
                        left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                        broken = with_role(pipeline, replace(role, **{part: left}))
                        assert is_red(broken, seed, RUNS), (part, event)
