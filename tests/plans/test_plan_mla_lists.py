"""Plans of the Hopper kernel for listed latent rows: what it accepts, what fits, what is said of it, and its
pipeline in any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from broken_graphs import is_red, with_role
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.kernels import dispatch
from fa4flex.kernels.lists.config import TABLE
from fa4flex.kernels.mla_lists_sm90.plan import MLA_LISTS_SM90, ListedRowsPlan
from fa4flex.kernels.mla_lists_sm90.topology import listed_rows_topology
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.keys import CONTIGUOUS, TOGETHER, in_pages, of_lists
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal

FACTS = fa4flex.compile().program.facts
ROWS = Problem(576, 512, keys=of_lists(CONTIGUOUS, counted=True, beside=True, latent=True))


def planned(problem: Problem, schedule: Schedule = Schedule()) -> ListedRowsPlan:
    plan = plan_forward(FACTS, problem, SM90A, schedule, sizes=sizes_of(4096))
    assert isinstance(plan, ListedRowsPlan)
    return plan


@pytest.mark.parametrize("lengths", ("dense", "used", "packed"))
def test_it_takes_listed_rows_and_no_others(lengths: Any) -> None:
    """Few queries and many, of contiguous rows and of pages of any size."""
    for rows, page in product((1, 4096), (0, *TOGETHER)):
        keys = of_lists(in_pages(page), False, False, latent=True) if page else ROWS.keys
        problem = replace(ROWS, lengths=lengths, keys=keys)
        assert dispatch.choose("forward", problem, SM90A, sizes_of(rows)) is MLA_LISTS_SM90
    for keys in (CONTIGUOUS, of_lists(CONTIGUOUS, True, True)):
        others = replace(ROWS, lengths=lengths, keys=keys, head_dim=256, head_dim_v=256)
        assert dispatch.choose("forward", others, SM90A, sizes_of(1)) is not MLA_LISTS_SM90


@pytest.mark.parametrize(
    "changes",
    [
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
def test_others_have_no_kernel(changes: dict[str, Any]) -> None:
    for target, problem in ((SM90A, replace(ROWS, **changes)), (SM100A, ROWS)):
        with pytest.raises(fa4flex.UnsupportedError, match="listed latent rows"):
            dispatch.choose("forward", problem, target, sizes_of(64))


@pytest.mark.parametrize("width, value", [(576, 512), (320, 256), (448, 384), (512, 512)])
def test_resources(width: int, value: int) -> None:
    """Keys leave room for the table that repeated entries are found by."""
    for lengths in ("dense", "used", "packed"):
        plan = planned(replace(ROWS, head_dim=width, head_dim_v=value, lengths=lengths))  # type: ignore[arg-type]
        plan.check()
        config, ring = plan.config(), plan.topology.ring("k")
        assert plan.memory["k"].size == 128 * width * 2 >= 4 * TABLE
        assert ring.stages == 2 * width // 64 and not ring.copies and config.beside
        assert plan.need.total <= plan.registers.consumer
        assert (plan.splitting is None) == (lengths == "packed") == (not config.splits)


def test_it_is_explained() -> None:
    told = planned(ROWS).explain()
    assert "listed latent rows, and others beside their lists" in told and "each unit once" in told
    assert "4 warps gather" in told and "which share an output" in told
    splitting = planned(ROWS, Schedule(split=300)).splitting
    assert splitting is not None and splitting.share == 3 and splitting.tile_rows == 64
    for schedule in (Schedule(tile=(64, 64)), Schedule(order="row_major")):
        with pytest.raises(fa4flex.UnsupportedError, match="Schedule"):
            planned(ROWS, schedule)


WIDE = {"head_dim": 576, "head_dim_v": 512, "heads": 128, "kv_heads": 1, "latent": True}


def test_explain_counts_what_is_gathered() -> None:
    """128 heads are two tiles, each of which gathers the list."""
    ids = torch.arange(2048, dtype=torch.int32).expand(1, 1, 4, -1)
    lists, attn = fa4flex.Lists(ids, kv_len=8192, q_len=4), fa4flex.compile(mask=causal, scale=192**-0.5)
    for more in ({}, {"page_rows": 1}):
        told = " ".join(str(attn.explain(arch="sm_90a", lists=lists, **WIDE, **more)).split())
        assert "forward kernel for listed latent rows, sm_90a" in told
        assert f"{2 * 4 * 2048 * 1152 / 1e9:.3g} GB of latent rows" in told
    told = " ".join(str(attn.explain(arch="sm_100a", lists=lists, **WIDE)).split())
    assert "no kernel" in told and "lists of units of 1 keys are refused" in told
    narrow = {**WIDE, "head_dim": 192, "head_dim_v": 128, "heads": 16}
    told = " ".join(str(attn.explain(arch="sm_90a", lists=lists, **narrow)).split())
    assert "forward kernel for listed keys, sm_90a" in told
    with pytest.raises(fa4flex.InputError, match="beside listed keys"):
        attn.explain(arch="sm_90a", lists=lists, kv_dtype="float8_e4m3fn")


# --- the pipeline -------------------------------------------------------------------------------------------


def test_it_runs_in_any_order(seed: int) -> None:
    for tiles, (pieces, own) in product((1, 2, 5), ((3, 1), (9, 4), (2, 1))):
        pipeline = listed_rows_topology(pieces, own)
        for one in (pipeline, pipeline.least):
            check_counts(one)
            for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
                simulate(one, [tiles], pick)


RUNS = ([1], [2], [3])
"""Key tiles of each tile of queries, of runs in which something is left out."""


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits, releases or gatherings, the pipeline fails its checks or some run."""
    needed = "acquire", "wait", "release", "finish", "sync", "fill", "take", "give"
    graphs: tuple[Topology, ...] = listed_rows_topology(3, 1), listed_rows_topology(2, 1)
    tried = 0
    for pipeline, role in ((x, role) for x in graphs for role in x.roles):
        for part in ("opening", "first", "closing"):
            for i, event in enumerate(getattr(role, part)):
                # The graph has no memory that producers share before they gather.
                if event.action in needed and event.target not in ("entries", "listed"):
                    left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                    parts = {part: left} if part != "first" else {"first": left, "body": left}
                    assert is_red(with_role(pipeline, replace(role, **parts)), seed, RUNS), (role.name, event)
                    tried += 1
    assert tried >= 90
