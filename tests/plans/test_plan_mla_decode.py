"""Plans of the kernels for latent rows: what those of both chips accept; of Hopper's what fits, how keys are
split, and its pipeline in any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from broken_graphs import is_red, with_role
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels import dispatch
from fa4flex.kernels.mla_decode_sm90.plan import MLA_DECODE_SM90, LatentPlan
from fa4flex.kernels.mla_decode_sm90.topology import latent_topology
from fa4flex.kernels.mla_decode_sm100.plan import BlackwellLatentPlan
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import CONTIGUOUS, TOGETHER, LatentKeys, in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule

FACTS = fa4flex.compile().program.facts
ROWS = Problem(576, 512, keys=LatentKeys())


ON_BOTH = pytest.mark.parametrize("target", [SM90A, SM100A], ids=lambda target: target.name)


def planned(problem: Problem, schedule: Schedule = Schedule(), target: Target = SM90A) -> Any:
    plan = plan_forward(FACTS, problem, target, schedule, sizes=sizes_of(64))
    assert isinstance(plan, LatentPlan if target is SM90A else BlackwellLatentPlan)
    return plan


# --- which problems -----------------------------------------------------------------------------------


def test_it_takes_latent_rows_and_no_others() -> None:
    assert dispatch.choose("forward", ROWS, SM90A, sizes_of(64)) is MLA_DECODE_SM90
    for problem in (Problem(256, 256), Problem(192, 128), replace(ROWS, keys=CONTIGUOUS)):
        assert dispatch.choose("forward", problem, SM90A, sizes_of(64)) is not MLA_DECODE_SM90
    with pytest.raises(fa4flex.UnsupportedError, match="at most 576"):
        replace(ROWS, head_dim=640)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": "packed"},
        {"mask_form": "tables"},
        {"statistics": ("lse", "max_scores")},
        {"statistics": ("lse", "entropy")},
        {"head_dim": 568},
        {"head_dim_v": 448},
        {"dropout": True},
        {"weights": "elementwise"},
    ],
    ids=str,
)
@ON_BOTH
def test_others_have_no_kernel(target: Target, changes: dict[str, Any]) -> None:
    with pytest.raises(fa4flex.UnsupportedError, match="latent rows"):
        dispatch.choose("forward", replace(ROWS, **changes), target, sizes_of(64))


@pytest.mark.parametrize("rows", TOGETHER)
@ON_BOTH
def test_pages_of_enough_keys_are_read_in_place(target: Target, rows: int) -> None:
    """A piece is brought in eight boxes at most; a stage of Blackwell's ring holds all nine of a row."""
    pages = in_pages(rows)
    keys = LatentKeys(pages.loader, pages.together, pages.rows)
    problem = replace(ROWS, lengths="used", keys=keys)
    if rows < 8:
        with pytest.raises(fa4flex.UnsupportedError, match="pages"):
            dispatch.choose("forward", problem, target, sizes_of(64))
        return
    plan, box = planned(problem, target=target), min(rows, 64)
    plan.check()
    pieces = 1 if target is SM90A else 9
    assert plan.topology.ring("k").copies == (box * 128,) * (64 // box * pieces)
    assert plan.config().box_rows == box and plan.config().paged and plan.config().clears
    assert "pages: read in place" in plan.explain()


@ON_BOTH
def test_many_queries_have_no_kernel(target: Target) -> None:
    with pytest.raises(fa4flex.UnsupportedError, match="latent rows"):
        dispatch.choose("forward", ROWS, target, sizes_of(65))
    for schedule in (Schedule(tile=(64, 64)), Schedule(order="row_major")):
        with pytest.raises(fa4flex.UnsupportedError, match="Schedule"):
            planned(ROWS, schedule, target)


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_queries_of_a_sequence_are_limited_and_heads_are_not(heads: int) -> None:
    """The launch of one call serves others on its side of the limit."""
    for q_len, few in ((64, True), (65, False)):
        sizes = Sizes(Inputs(Shape(2, heads, q_len, 500), 1, 576, 512, keys=LatentKeys()))
        assert (dispatch.accepting("forward", ROWS, SM90A, sizes) is MLA_DECODE_SM90) == few
        reach: Reach = sizes.valid
        assert reach.holds((2, q_len, 500)) and not reach.holds((2, 64 + few, 500))


# --- what fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, value", [(576, 512), (320, 256), (448, 384), (512, 512)])
def test_resources(width: int, value: int) -> None:
    plan = planned(replace(ROWS, head_dim=width, head_dim_v=value))
    plan.check()
    config, ring = plan.config(), plan.topology.ring("k")
    assert plan.memory["q"].size == 64 * width * 2 and plan.memory["k"].size == 128 * width * 2
    assert ring.stages == 2 * width // 64 and ring.copies == (64 * 64 * 2,)
    assert config.own * 128 == value and config.spare == (value // 64,) * (width > value)
    assert plan.memory["p"].size == 2 * 64 * 64 * 2 * (width == value)
    assert plan.need.total <= plan.registers.consumer


def test_it_is_explained() -> None:
    told = planned(ROWS).explain()
    assert "pieces of 64 columns" in told and "which share an output" in told and "latent rows" in told


def test_tiles_of_heads_are_blocks() -> None:
    """A sequence of 128 heads has two tiles, whose blocks fill the chip as those of twice the sequences."""
    tiled, plain = (Splitting(128, 512, 132, 1, tile_rows=rows) for rows in (64, 0))
    assert tiled.splits(8, 8, 8192, 8 * 128)[:2] == plain.splits(8, 16, 8192, 8 * 128)[:2]
    assert tiled.splits(8, 8, 8192, 8 * 64) == plain.splits(8, 8, 8192, 8 * 64)
    assert planned(ROWS).splitting.tile_rows == 64
    assert planned(ROWS, Schedule(split=300)).splitting.share == 3


def test_facts_are_asked_of_pairs() -> None:
    """A mask without intervals needs no tables, however many rows there are."""
    attn = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: (q_idx * kv_idx + h) % 3 > 0)
    facts: Facts = attn.program.facts
    problem = replace(ROWS, mask_form="tables")
    asked = dispatch.by_pairs(facts, problem, SM90A, Schedule(), sizes_of(64))
    assert asked.mask_form == "pairs"


# --- the pipeline -------------------------------------------------------------------------------------


def sound(clears: bool, pieces: int = 3, own: int = 1) -> Topology:
    return latent_topology(pieces, own, clears)


def test_it_runs_in_any_order(seed: int) -> None:
    for clears, tiles, (pieces, own) in product((True, False), (1, 2, 5), ((3, 1), (9, 4), (2, 1))):
        pipeline = sound(clears, pieces, own)
        check_counts(pipeline)
        for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
            simulate(pipeline, [tiles], pick)


RUNS = ([1], [2], [3])
"""Key tiles of each tile of queries, of runs in which something is left out."""


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits, releases or gatherings, the pipeline fails its checks or some run."""
    needed = "acquire", "wait", "release", "finish", "sync", "load", "take", "give"
    tried = 0
    for pipeline, role in ((x, role) for x in (sound(False), sound(False, 2)) for role in x.roles):
        for part in ("opening", "first", "closing"):
            for i, event in enumerate(getattr(role, part)):
                if event.action in needed:
                    left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                    parts = {part: left} if part != "first" else {"first": left, "body": left}
                    assert is_red(with_role(pipeline, replace(role, **parts)), seed, RUNS), (role.name, event)
                    tried += 1
    assert tried >= 70
