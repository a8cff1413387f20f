"""Blackwell plans and their pipelines for tests, as they are and broken in one place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from broken_graphs import with_role
from checked_plans import plan_forward, sizes_of

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.expr import apply, sym
from fa4flex.kernels.bwd_sm100.plan import BlackwellBackwardPlan
from fa4flex.kernels.decode_sm100.plan import BlackwellDecodePlan
from fa4flex.kernels.fwd_sm100.columns import lay_out_columns
from fa4flex.kernels.fwd_sm100.plan import BlackwellPlan
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.fwd_sm100.topology import Handed, forward_topology
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.happens_before import Trace
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import Event, Topology
from fa4flex.kernels.plan.verify import round_robin, simulate

WIDTHS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (64, 32), (32, 128))
CAUSAL = Facts(SCORE, apply("ge", sym("q"), sym("kv")))
TILES = Tiles(2, 128, 128, 128, (2, 2), 2)


@cache
def planned(d: int, dv: int, queries: int = 200, **more: Any) -> BlackwellPlan:
    facts = Facts() if more.get("mask_form", "none") == "none" else CAUSAL
    plan = plan_forward(facts, Problem(d, dv, **more), SM100A, sizes=sizes_of(queries))
    assert isinstance(plan, BlackwellPlan)
    return plan


def every_plan() -> Iterator[BlackwellPlan]:
    """Plans of all supported widths, lengths and masks; equal pipelines may come more than once."""
    forms = (("dense", "none"), ("dense", "tables"), ("packed", "spans"), ("used", "none"))
    for (d, dv), (lengths, mask_form), queries in product(WIDTHS, forms, (200, 100)):
        yield planned(d, dv, queries, lengths=lengths, mask_form=mask_form)
    for d, dv, rows in ((128, 128, 16), (64, 64, 2), (96, 96, 128)):
        yield planned(d, dv, lengths="packed", mask_form="spans", keys=in_pages(rows))


def sound(
    tiles: Tiles = TILES,
    dynamic: bool = False,
    ragged: bool = False,
    columns: Columns | None = None,
    asked: bool = False,
) -> Topology:
    """Forward kernel's topology. `dynamic`: work tiles come from a counter; `asked`: from launch control."""
    handed: Handed = "answer" if asked else "number" if dynamic else ""
    return forward_topology(tiles, columns or lay_out_columns(tiles, SM100A), handed, ragged)


def fault_of(pipeline: Topology, *works: list[int]) -> str:
    """Error of the simulation, or ""."""
    for work in works or ([4, 1, 3], [1, 4, 1, 3], [1]):
        try:
            simulate(pipeline, work, round_robin())
        except PlanError as error:
            return str(error).splitlines()[0]
    return ""


def fails_check(pipeline: Topology) -> str:
    """Error of the topology's own check, which counts arrivals, or ""."""
    try:
        check_counts(pipeline)
    except PlanError as error:
        return str(error).splitlines()[0]
    return ""


def broken(pipeline: Topology, *works: list[int]) -> str:
    """Error of the topology's check or of the simulation, or ""."""
    return fails_check(pipeline) or fault_of(pipeline, *works)


# --- what a run did ------------------------------------------------------------------------------------


def edges(run: Trace) -> set[tuple[str, str]]:
    return {(str(run.steps[a]), str(run.steps[b])) for a, b in run.graph.edges}


def ordered(run: Trace, before: str, after: str) -> bool:
    """True if every step whose name ends with `before` comes before every one that ends with `after`: warp by
    warp where both are a warpgroup's."""
    firsts, seconds = (
        [(i, step.warp) for i, step in enumerate(run.steps) if str(step).endswith(words)]
        for words in (before, after)
    )
    pairs = [(a, b) for (a, v), (b, w) in product(firsts, seconds) if v == w or None in (v, w)]
    assert pairs, (before, after)
    return all(run.before(a, b) for a, b in pairs)


# --- broken --------------------------------------------------------------------------------------------


def with_ring(pipeline: Topology, name: str, **changes: int) -> Topology:
    rings = tuple(replace(r, **changes) if r.name == name else r for r in pipeline.rings)  # type: ignore[arg-type]
    return replace(pipeline, rings=rings)


def with_barrier(pipeline: Topology, name: str, arrivals: int) -> Topology:
    changed = (replace(b, arrivals=arrivals) if b.name == name else b for b in pipeline.mbarriers)
    return replace(pipeline, mbarriers=tuple(changed))


def dropped(pipeline: Topology, *but: str) -> Iterator[tuple[Event, str, Topology]]:
    """Each event of the roles other than `but`, where it is, and the pipeline without it."""
    for role in pipeline.roles:
        if role.name in but:
            continue
        for when, part in role.parts.items():
            for at, event in enumerate(part):
                less = replace(role, **{when: part[:at] + part[at + 1 :]})  # type: ignore[arg-type]
                yield event, f"{role.name}, {when}", with_role(pipeline, less)


def moved(pipeline: Topology, role: str, when: str, event: int, to: int) -> Topology:
    """One event of a part at another place."""
    old = pipeline.role(role)
    part = list(getattr(old, when))
    part.insert(to, part.pop(event))
    return with_role(pipeline, replace(old, **{when: tuple(part)}))  # type: ignore[arg-type]


def find(pipeline: Topology, role: str, when: str, words: str) -> int:
    events = getattr(pipeline.role(role), when)
    return next(i for i, e in enumerate(events) if f"{e.action} {e.target}" == words)


def awaits_nothing(event: Event, where: str) -> bool:
    """True if it awaits something of before the first key tile: kernels do not tell that one apart."""
    return where.endswith("first") and event.action == "await" and event.tile < 0


def wrong_counts(pipeline: Topology) -> list[Topology]:
    """Pipelines with one arrival more, or less, at one of the barriers."""
    wrong = [with_barrier(pipeline, b.name, b.arrivals + m) for b in pipeline.mbarriers for m in (-1, 1)]
    for ring, more in product(pipeline.rings, (-1, 1)):
        wrong.append(with_ring(pipeline, ring.name, full_arrivals=ring.full_arrivals + more))
        if not ring.shares_empty:
            wrong.append(with_ring(pipeline, ring.name, empty_arrivals=ring.empty_arrivals + more))
    return wrong


def with_columns(columns: Columns, name: str, first: int) -> Columns:
    """Tensor memory columns with one range elsewhere."""
    ranges = tuple(replace(r, first=first) if r.name == name else r for r in columns.ranges)
    return replace(columns, ranges=ranges)


def refuses_columns(plan: BlackwellBackwardPlan | BlackwellDecodePlan, moved: str, to: str) -> None:
    """Asserts that PlanError is raised where one range of columns is put over another."""
    first = next(r.first for r in plan.columns.ranges if r.name == to)
    columns = with_columns(plan.columns, moved, first)
    with pytest.raises(PlanError, match=r"while|live at once|nobody has read|before it is there"):
        pipeline = replace(plan.topology, overlaps=columns.overlaps)
        simulate(pipeline, [3], round_robin())
        lifetimes(pipeline, columns)
