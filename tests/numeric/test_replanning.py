"""Plans of other calls: within the extents for which a plan is valid, planning again makes the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from kernel_programs import KINDS, Width

import fa4flex
from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import Extents, Reach
from fa4flex.codegen.evaluate import Captured
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.lower import Given, Lowered, lower_backward, lower_forward
from fa4flex.runtime.cuda.calls.signatures import numbers_of

WIDTHS: tuple[Width, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192))
LENGTHS: tuple[Lengths, ...] = ("dense", "dense", "packed", "used")
EDGES = (1, 2, 16, 32, 64, 65, 100, 128, 129, 256, 257, 400, 512, 513, 1000, 1024, 1025, 4096, 8449)
FAR = 20_000
"""Extents that are large enough for every question."""


class Program:
    """A variant at a width, for a chip and a pass, its mask and indices proved at the extents of one call."""

    def __init__(self, kind: str, target: Target, direction: str, draw: random.Random) -> None:
        engine, call = KINDS[kind].called(draw.choice(WIDTHS))
        inputs = call.inputs(call.q.dtype)
        if inputs.lengths == "dense":
            inputs = replace(inputs, lengths=draw.choice(LENGTHS))
        keys_used = inputs.lengths == "used" and draw.random() < 0.5
        self.inputs = replace(inputs, keys_used=keys_used, kv_heads=draw.choice((1, 2, 3, 6)))
        captured = Captured(call.operands, numbers_of(engine.kinds, call), engine.bits)
        schedule = fa4flex.Schedule(deterministic=draw.random() < 0.2)
        self.given = Given(
            engine.facts,
            schedule,
            self.inputs,
            captured,
            target,
            bound=self.shape(call_extents(inputs.extents)),
        )
        self.lower: Any = lower_forward if direction == "forward" else lower_backward

    def shape(self, extents: Extents) -> Shape:
        batch, q_len, kv_len = extents
        kind = Shape if self.inputs.lengths == "dense" else Ragged
        return kind(batch, self.inputs.extents.heads, q_len, kv_len)

    def at(self, extents: Extents) -> Lowered:
        found: Lowered = self.lower(
            replace(self.given, inputs=replace(self.inputs, extents=self.shape(extents)))
        )
        return found


def call_extents(shape: Shape) -> Extents:
    return shape.batch, shape.q_len, shape.kv_len


def within(valid: Reach, draw: random.Random) -> Extents:
    """Extents of the range, at its ends or between."""

    def one(least: int, most: int) -> int:
        least, most = max(least, 1), min(most, max(least, FAR))
        inside = [n for n in EDGES if least <= n <= most]
        return draw.choice([least, most, draw.randint(least, most), *inside])

    return tuple(map(one, valid.least, valid.most))  # type: ignore[return-value]


def check(kind: str, target: Target, direction: str, draw: random.Random) -> int:
    """Returns the number of plans that were made again."""
    program, again = Program(kind, target, direction, draw), 0
    for _ in range(3):
        extents = draw.choice((1, 1, 2, 3, 5, 33)), draw.choice(EDGES), draw.choice(EDGES)
        try:
            found = program.at(extents)
        except fa4flex.UnsupportedError:
            continue
        assert found.valid.holds(extents)
        for _ in range(3):
            other = within(found.valid, draw)
            same = program.at(other)
            assert (same.plan, same.problem, same.source.text) == (
                found.plan,
                found.problem,
                found.source.text,
            ), f"{kind}: a plan for {extents} is said to be valid for {other}"
            again += 1
    return again


def check_all(target: Target, direction: str, seed: int) -> None:
    draw = random.Random(seed)
    assert sum(check(kind, target, direction, draw) for kind in KINDS) > len(KINDS)


BOTH = pytest.mark.parametrize("direction", ("forward", "backward"))
CHIPS = pytest.mark.parametrize("target", (SM90A, SM100A), ids=lambda target: target.name)


@CHIPS
@BOTH
def test_plans_are_the_same_where_they_are_valid(target: Target, direction: str, seed: int) -> None:
    check_all(target, direction, seed)


@CHIPS
@BOTH
def test_questions_that_are_not_noted_are_noticed(target: Target, direction: str, seed: int) -> None:
    with (
        patch.object(Sizes, "narrow", lambda *_: None),
        pytest.raises(AssertionError, match="said to be valid"),
    ):
        for n in range(10):  # some draws may ask nothing that decides
            check_all(target, direction, seed + n)
