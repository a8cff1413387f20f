"""Questions about sizes: their answers, and the extents of other calls that get the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import Extents, Reach
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.sizes import UNKNOWN, Right, Sizes

HEADS, KV_HEADS = 12, 3
KINDS: tuple[tuple[Lengths, bool], ...] = (
    ("dense", False),
    ("used", False),
    ("used", True),
    ("packed", False),
)
"""Lengths, and whether keys of a padded batch have lengths."""

Question = tuple[Callable[[Sizes], Any], Callable[[Extents], Any]]
"""A question, and its answer by arithmetic."""


def sizes_at(extents: Extents, lengths: Lengths = "dense", keys_used: bool = False) -> Sizes:
    batch, q_len, kv_len = extents
    shape = (Shape if lengths == "dense" else Ragged)(batch, HEADS, q_len, kv_len)
    return Sizes(Inputs(shape, KV_HEADS, 64, 64, lengths=lengths, keys_used=keys_used))


def questions(draw: random.Random, lengths: Lengths, keys_used: bool) -> list[Question]:
    """All kinds of questions, with numbers near those that are drawn."""

    def usual(batch: int, keys: int) -> int:
        return keys // max(batch, 1) if lengths == "packed" else keys // 2 if keys_used else keys

    def power(batch: int) -> int:
        return max(2**i for i in range(10) if 2**i <= max(batch, 1))

    n, m, few, tile = (
        draw.choice(most) for most in ((0, 1, 7, 64, 900), (1, 50, 700), (0, 1, 5, 66), (64, 128))
    )
    return [
        (lambda s: s.batch_power(), lambda e: power(e[0])),
        (lambda s: s.q.at_most(n), lambda e: e[1] <= n),
        (lambda s: s.q.at_most(m * s.batch_power()), lambda e: (e[1] <= m * power(e[0]), power(e[0]))),
        (lambda s: s.q.more_than(m), lambda e: e[1] > m),
        (lambda s: s.rows.at_most(n), lambda e: e[1] * (HEADS // KV_HEADS) <= n),
        (lambda s: s.kv.more_than(n), lambda e: e[2] > n),
        (lambda s: s.usual_keys.more_than(m), lambda e: usual(e[0], e[2]) > m),
        (lambda s: s.tiles(tile).at_most(few), lambda e: e[0] * -(-e[2] // tile) <= few),
    ]


def drawn(draw: random.Random) -> Extents:
    batch = draw.choice((1, 1, 2, 3, 4, 7, 8, 40))
    return batch, *(draw.choice((0, 1, 64, 65, 700, 5000, draw.randint(1, 1000))) for _ in "qk")  # type: ignore[return-value]


def check(seed: int) -> None:
    """Answers are right, and the same within the range that is noted."""
    draw = random.Random(seed)
    for lengths, keys_used in KINDS * 60:
        asked = draw.sample(questions(draw, lengths, keys_used), draw.randint(1, 3))
        extents = drawn(draw)
        sizes = sizes_at(extents, lengths, keys_used)
        for question, answer in asked:
            expected = answer(extents)
            assert question(sizes) == (expected[0] if isinstance(expected, tuple) else expected)
        assert sizes.valid.holds(extents)
        for other in (drawn(draw) for _ in range(40)):
            if sizes.valid.holds(other):
                assert [answer(other) for _, answer in asked] == [answer(extents) for _, answer in asked]


def test_calls_within_the_range_get_the_same_answers(seed: int) -> None:
    check(seed)


def test_a_question_that_is_not_noted_is_noticed(seed: int) -> None:
    with patch.object(Sizes, "narrow", lambda *_: None), pytest.raises(AssertionError):
        check(seed)


def test_ranges_end_where_answers_change() -> None:
    """Ranges of single extents do; those of products are boxes that hold some of the extents."""
    sizes = sizes_at((2, 300, 500))
    assert sizes.q.at_most(512) and sizes.q.more_than(128) and sizes.rows.at_most(4 * 400 + 3)
    assert sizes.kv.more_than(499) and sizes.batch_power() == 2
    assert (sizes.valid.least, sizes.valid.most[:2]) == ((2, 129, 500), (3, 400))
    for few, least, most in ((8, (0, 0, 0), (2, None, 512)), (7, (2, 0, 385), (None, None, None))):
        sizes = sizes_at((2, 300, 500))
        assert sizes.tiles(128).at_most(few) == (few == 8)
        assert sizes.valid.least == least
        assert all(n is None or n == m for n, m in zip(most, sizes.valid.most, strict=True))


def test_ranges_of_tiles_are_as_wide_as_what_was_asked_before_allows() -> None:
    """Keys beyond 128 have two tiles at least: three batch entries have more than four, as five have."""
    for batch in (3, 5, 9):
        sizes = sizes_at((batch, 300, 500))
        assert sizes.kv.more_than(128) and not sizes.tiles(128).at_most(4)
        assert sizes.valid.least == (3, 0, 129)


def test_nothing_is_known_of_unknown_sizes() -> None:
    for quantity in (UNKNOWN.q, UNKNOWN.kv, UNKNOWN.rows, UNKNOWN.usual_keys, UNKNOWN.tiles(64)):
        assert not quantity.at_most(1 << 40) and not quantity.more_than(0)
    assert UNKNOWN.batch_power() == 1 and UNKNOWN.valid == Reach()


@pytest.mark.parametrize("right", ["true", "no", "any"])
@pytest.mark.parametrize("true", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_which_answers_are_taken(right: Right, true: bool, other: bool) -> None:
    """A question that says nothing has its true answer; one for which no is right has no other answer than
    that."""
    sizes = sizes_at((2, 70, 500))
    most = 70 if true else 69
    sizes._others = {("q", most): other}
    taken = other if right == "any" or (right == "no" and not other) else true
    assert sizes.q.at_most(most, right) is taken
    assert sizes.answers == (() if right == "true" else ((("q", most), taken),))
    assert sizes.valid.holds((2, 70, 500))
    assert sizes.valid.holds((2, 1 if true else 1000, 500))
    assert sizes.valid.holds((2, 1000 if true else 1, 500)) is (taken is not true)
