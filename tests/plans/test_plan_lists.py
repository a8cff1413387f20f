"""Plans of kernels for listed keys: what they accept; of Hopper what fits, and its pipeline in any order of
events."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from broken_graphs import is_red, with_role
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels import dispatch
from fa4flex.kernels.lists.config import TABLE
from fa4flex.kernels.lists_sm90.plan import LISTS_SM90, ListsPlan
from fa4flex.kernels.lists_sm90.topology import lists_topology
from fa4flex.kernels.lists_sm100.plan import LISTS_SM100
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A, SM103A, Target
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.listed_keys import tiling_of

FACTS = fa4flex.compile().program.facts
LISTED = Problem(128, 128, keys=of_lists(CONTIGUOUS, counted=True, beside=True))
BY_MANY = replace(LISTED, keys=of_lists(CONTIGUOUS, counted=True, beside=True, many=True))
"""More than 64 rows share a list."""


def planned(problem: Problem, schedule: Schedule = Schedule()) -> ListsPlan:
    plan = plan_forward(FACTS, problem, SM90A, schedule, sizes=sizes_of(4096))
    assert isinstance(plan, ListsPlan)
    return plan


PIPELINES = {SM90A: LISTS_SM90, SM100A: LISTS_SM100, SM103A: LISTS_SM100}
TARGETS = pytest.mark.parametrize("target", PIPELINES, ids=lambda target: target.name)


@TARGETS
@pytest.mark.parametrize("lengths", ("dense", "used", "packed"))
def test_they_take_listed_keys_and_no_others(lengths: Any, target: Target) -> None:
    for rows in (1, 4096):
        problem = replace(LISTED, lengths=lengths)
        assert dispatch.choose("forward", problem, target, sizes_of(rows)) is PIPELINES[target]
        pages = replace(problem, keys=of_lists(in_pages(16), counted=False, beside=False))
        assert dispatch.choose("forward", pages, target, sizes_of(rows)) is PIPELINES[target]
        others = replace(problem, keys=CONTIGUOUS)
        assert dispatch.choose("forward", others, target, sizes_of(rows)) is not PIPELINES[target]


@TARGETS
@pytest.mark.parametrize(
    "changes",
    [
        {"mask_form": "tables"},
        {"statistics": ("lse", "max_scores")},
        {"statistics": ("lse", "entropy"), "lengths": "packed"},
        {"dropout": True},
        {"weights": "softpick"},
    ],
    ids=str,
)
def test_others_have_no_kernel(changes: dict[str, Any], target: Target) -> None:
    with pytest.raises(fa4flex.UnsupportedError, match="listed keys"):
        dispatch.choose("forward", replace(LISTED, **changes), target, sizes_of(64))


@pytest.mark.parametrize(
    "width, value",
    [(64, 64), (64, 128), (128, 128), (192, 128), (256, 256), (40, 96), (16, 16), (80, 16)],
)
def test_resources(width: int, value: int) -> None:
    """Keys and values leave room for the table that repeated entries are found by."""
    for problem, lengths in itertools.product((LISTED, BY_MANY), ("dense", "packed")):
        plan = planned(replace(problem, head_dim=width, head_dim_v=value, lengths=lengths))
        plan.check()
        assert sum(plan.memory[name].size for name in ("k", "v", "behind")) >= 4 * TABLE
        assert plan.need.total <= plan.registers.consumer
        assert (plan.splitting is None) == (lengths == "packed") == (not plan.config().splits)


def test_rows_that_share_a_list_share_what_is_gathered() -> None:
    """Two consumers where more rows share a list than one has; other splits, as there are fewer tiles."""
    one, two = planned(LISTED), planned(BY_MANY)
    assert (one.consumers, one.rows, one.config().threads) == (1, 64, 256)
    assert (two.consumers, two.rows, two.config().threads) == (2, 128, 384)
    assert two.blocks == 1 and two.kv_stages == 4
    assert two.memory["q"].size == 2 * one.memory["q"].size
    assert "2 consumers" in two.explain() and "128 heads" in two.explain()
    of_one, of_two = one.splitting, two.splitting
    assert of_one is not None and of_two is not None
    # 16 sequences of 128 heads: 32 tiles of 64 rows, two at a time on a multiprocessor, or 16 of 128.
    assert 32 * of_one.splits(16, 16, 2048, 16 * 128).most == 256
    assert 16 * of_two.splits(16, 16, 2048, 16 * 128).most == 128


@pytest.mark.parametrize(
    "heads, kv_heads, of_lists, queries, q_len, many",
    [
        (64, 1, 1, 1, 5, False),
        (65, 1, 1, 1, 5, True),
        (128, 1, 1, 1, 5, True),
        (128, 1, 2, 1, 5, False),
        (128, 2, 1, 1, 5, False),
        (64, 4, 4, 4, 100, False),
        (64, 4, 4, 5, 100, True),
        (64, 4, 4, 5, 3, False),
    ],
)
def test_which_lists_many_rows_share(
    heads: int, kv_heads: int, of_lists: int, queries: int, q_len: int, many: bool
) -> None:
    ids = torch.zeros(1, of_lists, -(-q_len // queries), 3, dtype=torch.int32)
    lists = fa4flex.Lists(ids, kv_len=100, q_len=q_len, queries=queries)
    assert tiling_of(lists, heads, kv_heads).many == many
    plan = fa4flex.compile().source(
        "plan", arch="sm_90a", q_len=q_len, kv_len=100, heads=heads, kv_heads=kv_heads, lists=lists
    )
    assert ("2 consumers" in plan) == many


@pytest.mark.parametrize(
    "heads, kv_heads, entries, queries, q_len, united",
    [
        (64, 4, 16, 1, 100, 4),
        (16, 1, 64, 1, 100, 4),
        (16, 1, 65, 1, 100, 2),
        (16, 1, 129, 1, 100, 1),
        (4, 1, 16, 1, 100, 16),
        (4, 1, 16, 1, 3, 2),
        (1, 1, 2, 1, 100, 32),
        (4, 1, 16, 8, 100, 2),
        (24, 1, 16, 1, 100, 2),
        (40, 1, 16, 1, 100, 1),
        (128, 1, 16, 1, 100, 1),
    ],
)
def test_how_many_lists_are_united(
    heads: int, kv_heads: int, entries: int, queries: int, q_len: int, united: int
) -> None:
    """Rows that a tile has room for, in powers of 2, whose entries can be compared with each other."""
    ids = torch.zeros(1, kv_heads, -(-q_len // queries), entries, dtype=torch.int32)
    lists = fa4flex.Lists(ids, kv_len=100, q_len=q_len, queries=queries)
    assert tiling_of(lists, heads, kv_heads).united == united
    problem = replace(LISTED, keys=of_lists(CONTIGUOUS, counted=True, beside=True, united=united))
    plan = planned(problem)
    plan.check()
    assert plan.config().united == united and plan.config().told == 1 + (united > 1)
    assert plan.blocks == 2 and plan.kv_stages == 2
    assert (f"queries of {united} lists" in plan.explain()) == (united > 1)


def test_it_is_explained() -> None:
    told = planned(LISTED).explain()
    assert "listed keys, and others beside their lists" in told and "each unit once" in told
    splitting = planned(LISTED).splitting
    assert splitting is not None and splitting.tile_rows == 64
    for schedule in (Schedule(tile=(64, 64)), Schedule(order="row_major")):
        with pytest.raises(fa4flex.UnsupportedError, match="Schedule"):
            planned(LISTED, schedule)


def test_facts_are_asked_of_pairs() -> None:
    """A mask without intervals needs no tables, however many rows there are."""
    attn = fa4flex.compile(mask=lambda b, h, q_idx, kv_idx: (q_idx * kv_idx + h) % 3 > 0)
    facts: Facts = attn.program.facts
    problem = replace(LISTED, mask_form="tables")
    assert dispatch.by_pairs(facts, problem, SM90A, Schedule(), sizes_of(4096)).mask_form == "pairs"


# --- the pipeline -------------------------------------------------------------------------------------


def sound(stages: int = 2, consumers: int = 1, united: int = 1) -> Topology:
    return lists_topology(128, 128, 64, stages, consumers, united)


def test_it_runs_in_any_order(seed: int) -> None:
    for stages, (consumers, united) in itertools.product((2, 3), ((1, 1), (2, 1), (1, 4))):
        for pipeline in (sound(stages, consumers, united), sound(stages, consumers, united).least):
            check_counts(pipeline)
            for tiles in (1, 2, 5):
                for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
                    simulate(pipeline, [tiles], pick)


RUNS = ([1], [2], [3], [4])
"""Key tiles of each tile of queries, of runs in which something is left out."""


@pytest.mark.parametrize("consumers", (1, 2))
def test_each_synchronisation_is_needed(consumers: int, seed: int) -> None:
    """Without one of its waits or releases, the pipeline fails its checks or some run."""
    needed = "acquire", "wait", "release", "finish", "sync", "fill"
    pipeline, tried = sound(consumers=consumers), 0
    for role in pipeline.roles:
        alike = role.first == role.body
        for part in ("opening", "first", "body", "last"):
            for i, event in enumerate(() if part == "body" and alike else getattr(role, part)):
                # The graph has no memory that producers share before they gather.
                if event.action in needed and event.target not in ("entries", "listed"):
                    left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                    parts = {"first": left, "body": left} if part == "first" and alike else {part: left}
                    assert is_red(with_role(pipeline, replace(role, **parts)), seed, RUNS), (role.name, event)
                    tried += 1
    assert tried >= {1: 14, 2: 38}[consumers]
