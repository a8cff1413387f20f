"""In how many parts groups of query heads are taken."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from checked_plans import plan_backward

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.plan.constants import H200
from fa4flex.kernels.plan.groups import Groups, groups_of
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM90A

Extents = tuple[int, int, int]

MEASURED = [
    ("16:1", (1, 8192, 8192), "causal", (8, 16)),
    ("32:2", (2, 4096, 4096), "causal", (8,)),
    ("28:4", (2, 4096, 4096), "causal", (7,)),
    ("64:8", (1, 8192, 8192), "causal", (4, 8)),
    ("32:8", (1, 2048, 2048), "causal", (2,)),
    ("32:8", (8, 2048, 2048), "causal", (1, 2)),
    ("32:8", (2, 8192, 8192), "window", (1,)),
    ("32:8", (4, 512, 8192), "causal", (1,)),
    ("16:1", (1, 4096, 4096), "none", (4, 8)),
    ("16:4", (4, 1537, 1537), "none", (4,)),
]
"""Heads, extents, mask, and the parts that took least on an H200, within 2 %."""

BEHIND = [("28:4", (4, 4096, 4096)), ("16:1", (64, 1964, 1964))]
"""Causal passes of whole groups that took 1.17 and 1.23 times what flash-attn-4 does, which has a block for
each query head: sections of one KV head each, of which the last one's longest tiles begin too late, and
of the second more queries and sums at a time than the cache holds."""


def of_heads(
    heads: str, mask: str = "causal", extents: Extents = (1, 4096, 4096), lengths: Lengths = "dense"
) -> Groups:
    queries, keys = (int(n) for n in heads.split(":"))
    batch, q_len, kv_len = extents
    shape = (Shape if lengths == "dense" else Ragged)(batch, queries, q_len, kv_len)
    inputs = Inputs(shape, keys, 128, 128, lengths=lengths)
    problem = Problem(
        128, 128, mask_form="none" if mask == "none" else "queries", met_alike=mask != "window",
        grouped=True, lengths=lengths,
    )  # fmt: skip
    plan = plan_backward(Facts(), problem, SM90A, sizes=Sizes(inputs))
    groups = groups_of(inputs, plan)
    assert groups is not None
    return groups


@pytest.mark.parametrize(("heads", "extents", "mask", "best"), MEASURED)
def test_parts_as_measured(heads: str, extents: Extents, mask: str, best: tuple[int, ...]) -> None:
    assert of_heads(heads, mask, extents).parts(*extents) in best


@pytest.mark.parametrize(("heads", "extents"), BEHIND)
def test_groups_whose_last_section_came_too_late_are_taken_in_parts(heads: str, extents: Extents) -> None:
    groups = of_heads(heads, extents=extents)
    seconds, taken = {one.what: one.seconds for one in groups.candidates(*extents)}, groups.parts(*extents)
    assert taken > 1 and seconds[1] > 1.12 * seconds[taken]


def test_parts_are_whole_heads(seed: int) -> None:
    draw = random.Random(seed)
    masks = {mask: of_heads("12:4", mask) for mask in ("none", "causal", "window")}
    for _ in range(200):
        one = replace(masks[draw.choice(list(masks))], group=draw.randrange(1, 33))
        extents = draw.randrange(1, 9), draw.randrange(5000), draw.randrange(5000)
        parts = one.parts(*extents)
        assert one.group % parts == 0, (one, extents, parts)
        assert replace(one, group=1).parts(*extents) == 1


def test_many_tiles_of_keys_are_not_taken_in_parts() -> None:
    """Nor are those of many packed sequences, which are short."""
    assert of_heads("32:8").parts(64, 1024, 1024) == 1
    assert of_heads("32:8", lengths="packed").parts(64, 32768, 32768) == 1


def test_parts_are_those_of_the_least_prediction(seed: int) -> None:
    draw = random.Random(seed)
    groups = of_heads("16:2")
    for _ in range(50):
        extents = draw.randrange(1, 40), draw.randrange(100, 9000), draw.randrange(100, 9000)
        seconds = {one.what: one.seconds for one in groups.candidates(*extents)}
        taken, least = groups.parts(*extents), min(seconds.values())
        error = H200.backward.error
        assert seconds[taken] * (1 - error) <= least
        assert all(seconds[n] * (1 - error) > least for n in seconds if n < taken)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
def test_pairs_of_fewer_multiprocessors_than_they_take(multiprocessors: int) -> None:
    """Another stream may have all but one: Schedule(sm_margin=...)."""
    groups = of_heads("8:2")
    few = replace(groups.time.target, multiprocessors=multiprocessors)
    for ctas in (1, 2):
        alone = replace(groups, time=replace(groups.time, target=few, ctas=ctas))
        assert alone.parts(2, 300, 300) in alone.divisors
