"""Every published mask against its definition from the papers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from helpers import mask_grid
from mask_definitions import CASES, Case, by_loops

from fa4flex import variants as v


@pytest.mark.parametrize("draw", CASES, ids=lambda draw: draw.__name__)
def test_mask_is_its_definition(draw: Callable[[random.Random], Case], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        case = draw(rng)
        assert torch.equal(mask_grid(case.mask, case.q_len, case.kv_len, case.batch), by_loops(case)), (
            case.mask
        )


def test_queries_before_the_first_key_are_no_global_tokens() -> None:
    marked = torch.tensor([True, False, False, True])
    for tokens in (marked, 1):
        seen = mask_grid(v.global_window(1, tokens), 8, 4)[0]
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
