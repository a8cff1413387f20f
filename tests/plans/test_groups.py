"""In how many parts groups of query heads are taken."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fa4flex.kernels.plan.groups import Groups

H200 = 132

MEASURED = [
    ("16:1", (1, 8192, 8192), True, (8, 16)),
    ("32:2", (2, 4096, 4096), True, (8,)),
    ("28:4", (2, 4096, 4096), True, (7,)),
    ("64:8", (1, 8192, 8192), True, (4,)),
    ("32:8", (1, 2048, 2048), True, (2,)),
    ("32:8", (8, 2048, 2048), True, (1, 2)),
    ("32:8", (2, 8192, 8192), True, (1,)),
    ("32:8", (4, 512, 8192), True, (1,)),
    ("16:1", (1, 4096, 4096), False, (4,)),
    ("16:4", (4, 1537, 1537), False, (4,)),
]
"""Heads, extents, whether there is a mask, and the parts that took least on an H200, within 2 %."""


def of_heads(heads: str, masked: bool = True) -> Groups:
    queries, keys = (int(n) for n in heads.split(":"))
    return Groups(queries // keys, keys, 128, H200, masked)


@pytest.mark.parametrize(("heads", "extents", "masked", "best"), MEASURED)
def test_parts_as_measured(
    heads: str, extents: tuple[int, int, int], masked: bool, best: tuple[int, ...]
) -> None:
    assert of_heads(heads, masked).parts(*extents) in best


def test_parts_are_whole_heads(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        group, kv_heads = draw.randrange(1, 33), draw.randrange(1, 9)
        one = Groups(group, kv_heads, 128, H200, draw.random() < 0.5, draw.random() < 0.3)
        extents = draw.randrange(1, 9), draw.randrange(5000), draw.randrange(5000)
        parts = one.parts(*extents)
        assert group % parts == 0, (one, extents, parts)
        assert replace(one, group=1).parts(*extents) == 1


def test_many_tiles_of_keys_are_not_taken_in_parts() -> None:
    """Nor are those of many packed sequences, which are short."""
    assert of_heads("32:8").parts(64, 4096, 4096) == 1
    assert replace(of_heads("32:8"), packed=True).parts(64, 32768, 32768) == 1
