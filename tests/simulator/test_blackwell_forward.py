"""This library's Blackwell forward on a simulated B200: right, clean, the same bits under every timing.

A run takes a random sample of blackwell.GROUPS, some calls of every kind; `-m exhaustive` takes all of them.
"""

from __future__ import annotations

import random

import pytest
import torch
from blackwell import GROUPS, TIMINGS, Maker

SAMPLES = {
    "variants": 2,
    "gym": 1,
    "lengths": 1,
    "heads": 1,
    "widths": 1,
    "strides": 1,
    "edges": 1,
    "sequences": 1,
}
"""Calls that a run makes of each group: as many as take a minute in all."""


def check(name: str, make: Maker, timings: list[tuple[str, int]]) -> None:
    """Checks one call; a failure's seed repeats it: call, tensors and timings."""
    call, first = make(), None
    for timing, seed in timings:
        print(f"{name}: {timing} {seed}")
        found = call.run(timing, seed)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), "not the same bits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "turn"), [(group, turn) for group, count in SAMPLES.items() for turn in range(count)]
)
def test_sample(group: str, turn: int) -> None:
    calls = GROUPS[group]
    if not calls:
        pytest.skip("attn_gym is not installed")
    name = random.choice(list(calls))
    check(name, calls[name], random.sample(TIMINGS, 2))


EVERY = [
    pytest.param(group, name, id=f"{group}: {name}") for group, calls in GROUPS.items() for name in calls
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("group", "name"), EVERY)
def test_call(group: str, name: str) -> None:
    """Under every timing."""
    check(name, GROUPS[group][name], list(TIMINGS))


def test_groups_hold_what_must_be_shown() -> None:
    assert sum(map(len, GROUPS.values())) > 350 and set(SAMPLES) == set(GROUPS)
    assert len(GROUPS["variants"]) > 40
