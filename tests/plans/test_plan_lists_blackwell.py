"""Plans of the Blackwell kernel for listed keys: what fits, copies of rows, and its
pipeline, proved and broken."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from barrier_counts import counts_of
from blackwell_plans import broken, dropped, refuses_columns, wrong_counts
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.kernels.fwd_sm90.registers import Split
from fa4flex.kernels.lists.config import TABLE
from fa4flex.kernels.lists_sm100 import plan as plans
from fa4flex.kernels.lists_sm100.plan import BlackwellListsPlan
from fa4flex.kernels.lists_sm100.roles import barrier_table
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import CONTIGUOUS, of_lists
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.topology import Event
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule

FACTS = fa4flex.compile().program.facts
LISTED = Problem(128, 128, keys=of_lists(CONTIGUOUS, counted=True, beside=True))
BY_MANY = replace(LISTED, keys=of_lists(CONTIGUOUS, counted=True, beside=True, many=True))
"""More than 64 rows share a list."""
UNITED = replace(LISTED, keys=of_lists(CONTIGUOUS, counted=True, beside=True, united=4))
TILES = ([1], [2], [3], [9])
"""Key tiles that a block visits; the rings go round more than once."""


@cache
def planned(problem: Problem = LISTED, schedule: Schedule = Schedule()) -> BlackwellListsPlan:
    plan = plan_forward(FACTS, problem, SM100A, schedule, sizes=sizes_of(4096))
    assert isinstance(plan, BlackwellListsPlan)
    return plan


# --- what fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "width, value",
    [(64, 64), (64, 128), (128, 128), (192, 128), (256, 256), (40, 96), (16, 16), (80, 16)],
)
def test_resources(width: int, value: int) -> None:
    """Keys and values leave room for the table that repeated entries are found by."""
    for problem, lengths in itertools.product((LISTED, BY_MANY, UNITED), ("dense", "packed")):
        plan = planned(replace(problem, head_dim=width, head_dim_v=value, lengths=lengths))
        plan.check()
        assert sum(plan.memory[name].size for name in ("k", "v", "behind")) >= 4 * TABLE
        assert (plan.splitting is None) == (lengths == "packed") == (not plan.config().splits)


def test_rows_that_share_a_list_share_what_is_gathered() -> None:
    """A tile has all lanes of tensor memory as rows where more than 64 share a list; else each row is there
    twice."""
    one, two = planned(LISTED), planned(BY_MANY)
    assert (one.copies, one.rows, one.blocks, one.kv_stages) == (2, 64, 2, 3)
    assert (two.copies, two.rows, two.blocks, two.kv_stages) == (1, 128, 1, 6)
    assert one.config().threads == two.config().threads == 288
    assert "128 heads" in two.explain() and "each copy meets 32 keys" not in two.explain()
    of_one, of_two = one.splitting, two.splitting
    assert of_one is not None and of_two is not None
    assert (of_one.tile_rows, of_two.tile_rows) == (64, 128)


def test_warps_have_the_registers_of_their_launch() -> None:
    """Two blocks of nine warps are 18: some quarter of the multiprocessor, of 16,384 registers, has five."""
    one, two = planned(LISTED), planned(BY_MANY)
    assert (one.registers, two.registers) == (96, 168)
    for plan in (one, two):
        assert plan.split.producer + plan.split.consumer == 2 * plan.registers
        more = {plan.blocks: Split(plan.split.producer, plan.split.consumer + 8)}
        with patch.dict(plans.SPLITS, more), pytest.raises(PlanError, match="registers"):
            plan.check_resources()


def test_it_is_explained() -> None:
    told = planned(LISTED).explain()
    assert "listed keys, and others beside their lists" in told and "each unit once" in told
    assert "queries of 4 lists" in planned(UNITED).explain()
    for schedule in (Schedule(tile=(64, 64)), Schedule(order="row_major")):
        with pytest.raises(fa4flex.UnsupportedError, match="Schedule"):
            planned(LISTED, schedule)


@pytest.mark.parametrize("heads, rows", [(64, 64), (65, 128)])
def test_calls_are_told_their_kernel(heads: int, rows: int) -> None:
    lists = fa4flex.Lists(torch.zeros(1, 1, 5, 3, dtype=torch.int32), kv_len=100)
    told = str(
        fa4flex.compile().explain(arch="sm_100a", q_len=5, kv_len=100, heads=heads, kv_heads=1, lists=lists)
    )
    assert "listed keys" in told and f"tiles of {rows} x 64 compute" in told


# --- the pipeline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", (LISTED, BY_MANY, UNITED), ids=("one", "many", "united"))
@pytest.mark.parametrize("width", (64, 128, 256))
def test_it_runs_in_any_order(problem: Problem, width: int, seed: int) -> None:
    plan = planned(replace(problem, head_dim=width, head_dim_v=width))
    for pipeline in (plan.topology, plan.topology.least):
        for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
            for tiles in TILES:
                simulate(pipeline, tiles, pick)
    nodes = lifetimes(plan.topology, plan.columns).nodes
    assert all(nodes[c]["read"] for c in (("S", 2), ("P", 2), ("Q", 0), ("O", 5)))


def test_counts_are_the_kernels() -> None:
    table = barrier_table(planned().kv_stages)
    assert counts_of(table) == arrivals_of(planned().topology)
    assert [table[name].arrivals for name in ("ids_full", "ids_empty", "p_full", "o_full")] == [4, 4, 4, 1]


def test_every_dropped_event_is_found() -> None:
    pipeline = planned().topology
    assert not broken(pipeline, *TILES)
    every = [x for x in dropped(pipeline) if matters(*x[:2])]
    assert len(every) > 35
    for event, where, less in every:
        assert broken(less, *TILES), f"{event} of {where}"


def matters(event: Event, where: str) -> bool:
    """True if the graph finds that an event is missing. It knows of memory warp by warp: what other warps
    wrote, and what producers share before they gather, is for the simulated GPU. An output that is read in
    parts is read."""
    crossing = event.action == "sync" and event.target in ("meeting", "entries", "listed")
    return not (crossing or (event.action == "read" and event.target == "O"))


def test_wrong_counts_are_found() -> None:
    wrong = wrong_counts(planned().topology)
    assert len(wrong) > 12 and all(broken(one, *TILES) for one in wrong)


@pytest.mark.parametrize("moved, to", [("Q", "S"), ("O", "S"), ("O", "P"), ("Q", "O")])
def test_columns_that_live_at_once_are_not_shared(moved: str, to: str) -> None:
    refuses_columns(planned(), moved, to)
