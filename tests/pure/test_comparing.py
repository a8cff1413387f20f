"""How tests compare errors with plain PyTorch's: the luck of a few draws is not taken for a defect."""

from __future__ import annotations

import math
import random

import pytest
from helpers import Errors, no_worse, worse


def lucky(times: float) -> tuple[Errors, Errors]:
    """Errors of which either may be twice the other by luck, ours `times` as large besides."""
    return [times * random.uniform(1, 2)], [random.uniform(1, 2)]


def test_as_good_passes() -> None:
    for _ in range(300):
        no_worse(lambda: lucky(1.0), draws=3)


@pytest.mark.parametrize("times", [4.1, math.nan])
def test_what_is_worse_fails(times: float) -> None:
    for _ in range(100):
        with pytest.raises(AssertionError):
            no_worse(lambda: lucky(times), draws=3)


def test_one_draw_far_off_fails() -> None:
    assert "once" in worse([*(lucky(1.0) for _ in range(20)), ([9.0], [1.0])])


def test_more_draws_decide() -> None:
    drawn = iter([([3.0], [1.0])] * 2 + [([1.0], [1.0])] * 10)
    no_worse(lambda: next(drawn), draws=3)
    assert next(drawn, None) is None
