"""Plans of the Hopper backward kernel for listed keys: what it accepts, what fits, and its pipeline in any
order of events."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from broken_graphs import is_red, with_role
from checked_plans import plan_backward, sizes_of

import fa4flex
from fa4flex.kernels import dispatch
from fa4flex.kernels.bwd_lists_sm90.config import SumsConfig
from fa4flex.kernels.bwd_lists_sm90.plan import BWD_LISTS_SM90, ListsBackwardPlan
from fa4flex.kernels.bwd_lists_sm90.topology import lists_backward_topology
from fa4flex.kernels.lists.config import TABLE
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate

FACTS = fa4flex.compile().program.facts
LISTED = Problem(128, 128, keys=of_lists(CONTIGUOUS, counted=True, beside=True))


def planned(problem: Problem) -> ListsBackwardPlan:
    plan = plan_backward(FACTS, problem, SM90A, sizes=sizes_of(4096))
    assert isinstance(plan, ListsBackwardPlan)
    return plan


@pytest.mark.parametrize("lengths", ("dense", "used", "packed"))
def test_it_takes_listed_keys_and_no_others(lengths: Any) -> None:
    problem = replace(LISTED, lengths=lengths)
    assert dispatch.choose("backward", problem, SM90A, sizes_of()) is BWD_LISTS_SM90
    others = replace(problem, keys=CONTIGUOUS)
    assert dispatch.choose("backward", others, SM90A, sizes_of()) is not BWD_LISTS_SM90


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_form": "tables"},
        {"mask_form": "queries"},
        {"deterministic": True},
        {"gradients": ((0, "sum"),), "operands": (("float32", 1),)},
        {"statistics": ("lse", "entropy")},
        {"dropout": True},
        {"weights": "elementwise"},
        {"head_dim": 160},
        {"head_dim_v": 256},
        {"out_dtype": "float32"},
        {"keys": of_lists(in_pages(16), counted=False, beside=False)},
    ],
    ids=str,
)
def test_others_have_no_kernel(changes: dict[str, Any]) -> None:
    for target, problem in ((SM90A, replace(LISTED, **changes)), (SM100A, LISTED)):
        with pytest.raises(fa4flex.UnsupportedError, match="listed keys"):
            dispatch.choose("backward", problem, target, sizes_of())


@pytest.mark.parametrize("width, value", [(64, 64), (64, 128), (128, 128), (96, 40), (16, 16), (128, 32)])
def test_resources(width: int, value: int) -> None:
    """Two blocks share a multiprocessor; keys, values, P and dS leave room for the table of entries."""
    for lengths, united in itertools.product(("dense", "packed"), (1, 4)):
        keys = of_lists(CONTIGUOUS, counted=True, beside=True, united=united)
        plan = planned(replace(LISTED, head_dim=width, head_dim_v=value, lengths=lengths, keys=keys))
        assert sum(plan.memory[name].size for name in ("k", "v", "p", "ds", "behind")) >= 4 * TABLE
        assert 2 * (plan.memory.total + 1024) <= SM90A.shared_memory + 1024
        assert plan.config().united == united and plan.config().v_stages == plan.stages[1]
        assert "dK and dV are added up in float32" in plan.explain()


@pytest.mark.parametrize("width", (32, 64, 96, 128))
def test_sums_have_a_place_for_each_number(width: int) -> None:
    order = SumsConfig(width).dq_order
    places = {order.place(n) for n in range(order.size)}
    assert places == set(itertools.product(range(64), range(width)))
    # Four that a lane adds at once: of columns 2 l and 8 + 2 l on.
    assert [order.place(4 + n)[1] for n in range(4)] == [2, 3, 10, 11]


# --- the pipeline -------------------------------------------------------------------------------------


def sound(stages: tuple[int, int] = (2, 1), united: int = 1) -> Topology:
    return lists_backward_topology(128, 128, stages, united)


def test_it_runs_in_any_order(seed: int) -> None:
    for stages, united in itertools.product(((2, 1), (3, 3)), (1, 4)):
        for pipeline in (sound(stages, united), sound(stages, united).least):
            check_counts(pipeline)
            for tiles in (1, 2, 5):
                for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed)):
                    simulate(pipeline, [tiles], pick)


RUNS = ([1], [2], [3], [4])
"""Key tiles of each tile of queries, of runs in which something is left out."""


def test_each_synchronisation_is_needed(seed: int) -> None:
    """Without one of its waits or releases, the pipeline fails its checks or some run."""
    needed = "acquire", "wait", "release", "finish", "sync", "fill"
    pipeline, tried = sound(), 0
    for role in pipeline.roles:
        for part in ("opening", "first", "last"):
            for i, event in enumerate(getattr(role, part)):
                # The graph has one consumer, whose warps meet by themselves, and no memory of entries.
                if event.action in needed and event.target not in ("entries", "listed", "free", "shared"):
                    left = getattr(role, part)[:i] + getattr(role, part)[i + 1 :]
                    parts = {"first": left, "body": left} if part == "first" else {part: left}
                    assert is_red(with_role(pipeline, replace(role, **parts)), seed, RUNS), (role.name, event)
                    tried += 1
    assert tried >= 17
