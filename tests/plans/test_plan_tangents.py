"""Plans of attention and its tangents: products and tiles by what a call has; what no kernel does, in words;
the pipeline, proved and broken."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from blackwell_plans import CAUSAL, broken, dropped, ordered
from checked_plans import sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.dispatch import plan_tangents
from fa4flex.kernels.jvp_sm90.plan import TangentPlan
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Event
from fa4flex.kernels.plan.verify import round_robin, trace

EVERY = "q", "k", "v"


def planned(d: int = 128, dv: int = 128, **more: Any) -> TangentPlan:
    facts = Facts() if more.get("mask_form", "none") == "none" else CAUSAL
    plan = plan_tangents(facts, Problem(d, dv, **{"moved": EVERY, **more}), SM90A, sizes=sizes_of(200))
    plan.check()
    assert isinstance(plan, TangentPlan)
    return plan


@pytest.mark.parametrize(("width", "keys"), [(64, 96), (96, 96), (128, 64)])
def test_accumulators_leave_room(width: int, keys: int) -> None:
    plan = planned(width, width)
    assert plan.tile == (128, keys)
    assert plan.need.total <= plan.registers.consumer and plan.memory.total <= SM90A.shared_memory


def test_every_kind_of_call_has_a_plan() -> None:
    forms = (("dense", "none"), ("dense", "tables"), ("packed", "spans"), ("used", "none"))
    for (lengths, form), moved, d, dv in product(forms, (("q",), ("k", "v"), EVERY), (40, 96), (64, 128)):
        planned(d, dv, lengths=lengths, mask_form=form, moved=moved)


@pytest.mark.parametrize(
    ("moved", "count"), [(("q",), 4), (("k",), 4), (("v",), 3), (("q", "k"), 5), (("q", "v"), 5), (EVERY, 6)]
)
def test_products_of_what_moves(moved: tuple[str, ...], count: int) -> None:
    """S and O; T by each of q and k, which O's tangent is multiplied by once; that by v."""
    plan, whole = planned(moved=moved), planned()
    assert plan.products == count and f"products: {count} " in plan.explain()
    absent = [f"t{name}" for name in EVERY if name not in moved]
    assert plan.memory.total == whole.memory.total - sum(whole.memory[name].size for name in absent)


def test_half_precision_keeps_maxima() -> None:
    """Probabilities of up to 2^8 times a tangent might be beyond float16."""
    assert planned(dtype="float16", out_dtype="float16").rescale_threshold == 0
    assert planned().rescale_threshold > 0


@pytest.mark.parametrize(
    ("problem", "target"),
    [
        (Problem(192, 128, moved=EVERY), SM90A),
        (Problem(128, 128, moved=EVERY, lengths="used", keys=in_pages(16)), SM90A),
        (Problem(128, 128, moved=EVERY, statistics=("lse", "max_scores")), SM90A),
        (Problem(128, 128, moved=EVERY, output=True), SM90A),
        (Problem(128, 128), SM90A),
        (Problem(128, 128, moved=EVERY), SM100A),
    ],
    ids=["wide", "pages", "maxima", "output", "none moves", "Blackwell"],
)
def test_refused_in_words(problem: Problem, target: Any) -> None:
    with pytest.raises(UnsupportedError, match="a tangents kernel for"):
        plan_tangents(Facts(), problem, target)


def test_registers_are_counted() -> None:
    plan = planned(moved=("q",))
    wide = replace(plan, tiles=replace(plan.tiles, tile_n=128))
    with pytest.raises(PlanError, match="registers per consumer thread"):
        wide.check_resources()


# --- the pipeline -------------------------------------------------------------------------------------------


def test_values_come_before_the_next_scores() -> None:
    """Scores take the registers of operands, and stages are written anew when both their tiles are read."""
    run = trace(planned().topology, [6], round_robin())
    for i in (0, 1):
        for j in range(5):
            assert ordered(run, f"consumer {i} finish O tile {j}", f"consumer {i} issue S tile {j + 1}")
    for (ring, what), j in product((("k", "S"), ("v", "O")), range(4)):
        assert ordered(run, f"consumer 1 finish {what} tile {j}", f"producer load {ring} tile {j + 2}")


@pytest.mark.parametrize("lengths", ["dense", "packed"])
def test_every_dropped_event_is_found(lengths: str) -> None:
    pipeline = planned(lengths=lengths, mask_form="spans").topology
    works = [4, 1, 3], [1, 4, 1, 3], [1]
    assert not broken(pipeline, *works)
    every = [x for x in dropped(pipeline, "consumer 1") if matters(x[0], x[1])]
    assert len(every) > 30
    for event, where, less in every:
        assert broken(less, *works), f"{event} of {where}"


def matters(event: Event, where: str) -> bool:
    """True if the simulation finds one less: warps of a warpgroup are one role here, what is cleared may be
    left out, and all others read the next number, too."""
    return not event.maybe and (event.action, event.target) != ("read", "next")
