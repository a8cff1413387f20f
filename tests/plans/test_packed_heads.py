"""Problems whose tiles of queries have rows of all heads that share a KV head, and their plans."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from checked_plans import plan_forward

import fa4flex
from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import Proved
from fa4flex.kernels.fwd_sm90.packing import GROUPS, MOST_PACKED
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.specialize import forward_problem
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.variants import alibi, causal, softcap

PLAIN = Facts()
GIVEN = Inputs(Shape(4, 16, 1537, 1537), 4, 128, 128)


def planned(facts: Facts, inputs: Inputs, target: Target = SM90A, form: Any = None) -> tuple[Any, Reach]:
    """The plan, and extents for which it is valid."""
    form = form or ("none" if facts.mask is PLAIN.mask else "spans")
    problem, sizes = forward_problem(facts, inputs, Proved(form, False, True)), Sizes(inputs)
    return plan_forward(facts, problem, target, sizes=sizes), sizes.valid


def packed(inputs: Inputs, facts: Facts = PLAIN, target: Target = SM90A, form: Any = None) -> int:
    heads: int = planned(facts, inputs, target, form)[0].packed_heads
    return heads


def valid(facts: Facts, inputs: Inputs) -> Reach:
    return planned(facts, inputs)[1]


@pytest.mark.parametrize("group", range(1, 130))
def test_groups_that_divide_the_rows_of_a_copy_share_tiles(group: int) -> None:
    given = replace(GIVEN, extents=Shape(4, 3 * group, 1537, 1537), kv_heads=3)
    assert packed(given) == (group if group in (1, 2, 4, 8, 16) else 1)


OTHERS: dict[str, tuple[Facts, Inputs, Target]] = {
    "a mask": (fa4flex.compile(mask=causal).program.facts, GIVEN, SM90A),
    "a score of queries and heads": (fa4flex.compile(alibi).program.facts, GIVEN, SM90A),
    "a score of scores": (fa4flex.compile(softcap(20.0)).program.facts, GIVEN, SM90A),
    "sinks": (PLAIN, replace(GIVEN, sinks=True), SM90A),
    "float32 output": (PLAIN, replace(GIVEN, out_dtype="float32"), SM90A),
    "packed sequences": (
        PLAIN,
        replace(GIVEN, extents=Ragged(4, 16, 6148, 6148), lengths="packed"),
        SM90A,
    ),
    "padded sequences": (PLAIN, replace(GIVEN, extents=Ragged(4, 16, 1537, 1537), lengths="used"), SM90A),
    "pages": (PLAIN, replace(GIVEN, keys=in_pages(128)), SM90A),
    "few rows": (PLAIN, replace(GIVEN, extents=Shape(4, 16, 16, 1537)), SM90A),
    "rows that 32 bits do not count": (
        PLAIN,
        replace(GIVEN, extents=Shape(1, 16, MOST_PACKED // 4 + 1, 9)),
        SM90A,
    ),
    "another chip": (PLAIN, GIVEN, SM100A),
}


@pytest.mark.parametrize("name", OTHERS)
def test_heads_of_all_others_have_tiles_of_their_own(name: str) -> None:
    facts, inputs, target = OTHERS[name]
    assert packed(GIVEN) == 4 and packed(inputs, facts, target) == 1


def test_a_launch_serves_all_lengths_of_its_ratio() -> None:
    """From those that are no few rows on; narrow heads are not told apart by their queries."""
    for width in (64, 128):
        given = replace(GIVEN, head_dim=width, head_dim_v=width)
        for length in (33, 256, 257, 1537, MOST_PACKED // 4):
            reach = valid(PLAIN, replace(given, extents=Shape(4, 16, length, 9)))
            assert (reach.least[1], reach.most[1]) == (33, MOST_PACKED // 4)
    few, sliced = (valid(PLAIN, replace(GIVEN, extents=Shape(4, 16, length, 9))) for length in (16, 20))
    assert (sliced.least[1], sliced.most[1]) == (17, 32)
    beyond = valid(PLAIN, replace(GIVEN, extents=Shape(4, 16, MOST_PACKED // 4 + 1, 9)))
    assert few.most[1] == 16 and beyond.least[1] == MOST_PACKED // 4 + 1


CAUSAL = fa4flex.compile(mask=causal).program.facts


def sequences(batch: int, tokens: int, group: int = 4, width: int = 128, **others: Any) -> Inputs:
    """Packed sequences of so many tokens in all."""
    extents = Ragged(batch, 2 * group, tokens, tokens)
    return replace(Inputs(extents, 2, width, width, lengths="packed"), **others)


@pytest.mark.parametrize(("group", "width", "facts", "most"), [
    (2, 128, CAUSAL, 352), (4, 128, CAUSAL, 528), (8, 128, CAUSAL, 616), (16, 128, CAUSAL, 660),
    (4, 64, CAUSAL, 1056), (4, 128, PLAIN, 264), (4, 64, PLAIN, 528),
])  # fmt: skip
def test_short_sequences_share_tiles(group: int, width: int, facts: Facts, most: int) -> None:
    """Sequences have about as many queries on average, whatever each has; in batches of 4 to 7, half as many
    again for 4."""
    for batch, least in ((1, 1), (7, 4), (4, 4), (64, 64), (100, 64)):
        in_all = most * least * 3 // 2
        found = [packed(sequences(batch, in_all + n, group, width), facts) for n in (-most, 0, 1, 9000)]
        assert found == [group, group, 1, 1]


def test_a_launch_serves_sequences_that_are_short_and_others_that_are_not() -> None:
    draw, limit = random.Random(0), 528
    for _ in range(300):
        batch, tokens = draw.randint(1, 200), draw.randint(0, 200 * limit)
        mine = packed(sequences(batch, tokens), CAUSAL)
        reach = valid(CAUSAL, sequences(batch, tokens))
        least = 2 ** int(math.log2(batch))
        assert reach.holds((batch, tokens, 5)) and mine == (4 if tokens <= 1.5 * least * limit else 1)
        assert reach.holds((least, tokens, 5)) and reach.holds((2 * least - 1, tokens, 5))
        for _ in range(20):
            other = draw.randint(1, 200), draw.randint(0, 200 * limit)
            if reach.holds((*other, 9)):
                assert packed(sequences(*other), CAUSAL) == mine


WITHOUT: dict[str, tuple[Facts, Inputs]] = {
    "a mask of heads": (
        fa4flex.compile(mask=lambda b, h, q, k: q >= k + h).program.facts,
        sequences(4, 400),
    ),
    "a score of 16 heads": (fa4flex.compile(alibi, mask=causal).program.facts, sequences(4, 400, 16)),
    "sinks of 16 heads": (CAUSAL, sequences(4, 400, 16, sinks=True)),
    "a group that no copy has": (CAUSAL, sequences(4, 400, 7)),
    "heads without a group": (CAUSAL, sequences(4, 400, 1)),
    "pages": (CAUSAL, sequences(4, 400, keys=in_pages(128))),
    "padded sequences": (CAUSAL, sequences(4, 100, lengths="used")),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_heads_of_other_short_sequences_have_tiles_of_their_own(name: str) -> None:
    facts, inputs = WITHOUT[name]
    assert packed(sequences(4, 400), CAUSAL) == 4 and packed(inputs, facts) == 1
    assert packed(inputs, facts, SM100A) == 1


def test_scores_sinks_and_float32_outputs_of_8_heads_may_share_tiles() -> None:
    scored = fa4flex.compile(alibi, mask=causal).program.facts
    assert packed(sequences(4, 400, 8), scored) == packed(sequences(4, 400, 8, sinks=True), CAUSAL) == 8
    assert packed(sequences(4, 400, 8, out_dtype="float32"), CAUSAL) == 8
    assert packed(sequences(4, 400), CAUSAL, form="tables") == 1


def visits(lengths: list[int], queries: int) -> int:
    """Pairs of a tile of so many queries and one of 128 keys, under a causal mask, of a head or a group."""
    ends = (min(first + queries, n) for n in lengths for first in range(0, n, queries))
    return sum(-(-end // 128) for end in ends)


@pytest.mark.parametrize(("mean", "least", "most"), [(256, 0.13, 0.2), (512, 0.07, 0.12), (2048, 0.01, 0.05)])
def test_visits_that_random_lengths_save(mean: int, least: float, most: float) -> None:
    """Tiles of 4 heads save 16 %, 9 % and 2 %."""
    draw, apart, together = random.Random(0), 0, 0
    for _ in range(20):
        ends = sorted(draw.sample(range(1, 32768), 32768 // mean - 1))
        lengths = [b - a for a, b in itertools.pairwise([0, *ends, 32768])]
        apart, together = apart + 4 * visits(lengths, 128), together + visits(lengths, 32)
    assert least <= 1 - together / apart <= most


def test_the_kernel_is_told_and_so_are_readers() -> None:
    plan, _ = planned(PLAIN, GIVEN)
    alone = plan_forward(PLAIN, plan.problem, SM90A)
    assert (plan.config().group, alone.config().group) == (4, 1)
    assert (plan.memory, plan.topology, plan.registers) == (alone.memory, alone.topology, alone.registers)
    assert "rows of 4 heads" in plan.explain() and "rows of" not in alone.explain()


@pytest.mark.parametrize("width", (64, 128, 256))
def test_tiles_are_never_more(width: int) -> None:
    """Than those of heads by themselves, and fewer where these end within a tile."""
    rows, _ = plan_forward(PLAIN, Problem(width, width), SM90A).tile
    for group in (1, *GROUPS):
        for length in range(1, 700):
            together, apart = -(-length * group // rows), group * -(-length // rows)
            assert together <= apart and (together < apart) == (-length % rows * group >= rows)
