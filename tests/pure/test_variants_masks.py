"""Every case of every variant against its definition, and what masks say at their edges."""

from __future__ import annotations

import pytest
import torch
from variant_files import CASES, at_random

from fa4flex import variants as v
from fa4flex.variants._cases import Case, allowed, check


@pytest.mark.parametrize("case", CASES)
def test_variant_is_its_definition(case: Case, seed: int) -> None:
    """At random lengths, with random parameters."""
    for number in range(6):
        sizes = at_random(seed + number)
        drawn = case.draw(sizes)
        if drawn.definition is not None:
            check(sizes, drawn)


def test_queries_before_the_first_key_are_no_global_tokens() -> None:
    marked = torch.tensor([True, False, False, True])
    for tokens in (marked, 1):
        seen = allowed(v.global_window(1, tokens), 8, 4)[0]
        assert seen[:3].int().tolist() == [[1, 0, 0, int(tokens is marked)]] * 3
        assert seen[4].all()


def test_bigbird_draws_distinct_blocks_outside_window_and_globals(seed: int) -> None:
    from fa4flex.variants.bigbird import draw_blocks

    drawn = draw_blocks(20, 1, 2, 3, seed)
    for row, blocks in enumerate(drawn):
        assert len(set(blocks)) == 3
        assert all(k >= 2 and abs(k - row) > 1 for k in blocks)
    assert drawn == draw_blocks(20, 1, 2, 3, seed)
    assert drawn != draw_blocks(20, 1, 2, 3, seed + 1)
