"""Gradients where one block of Hopper's has all keys of its queries, and writes their dQ itself: no sums are
cleared before it, and nothing follows. Tensors that it writes hold NaN before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import SMS, Width, backward_launches, drawn_timing, of_backward, widths
from test_grouped_backward import in_parts
from test_simulated_backward import COMPOSED, judged

import ptxsim
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal

TILE = 128
"""Keys of a block."""

LENGTHS = (1, 64, TILE - 1, TILE, TILE + 1)
MASKED: dict[str, dict[str, Any]] = {
    **COMPOSED,
    "late queries": {"mask": lambda b, h, q, k: (q >= 140) & (k >= 3 * h)},
    "tiles in between": {"mask": lambda b, h, q, k: (q // 64 % 2 == h % 2) & ((q + k) % 3 > 0)},
    "nobody": {"mask": lambda b, h, q, k: (q < k) & (k < 0)},
    "causal": {"mask": causal},
}
"""Masks whose first, or every other, tiles of queries see nothing, and such that see all: by query intervals
and by tables."""


def close(
    name: str,
    lengths: tuple[int, int],
    width: Width,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    q_len, kv_len = lengths
    timing, seed = drawn_timing()
    where = f"{name}, {lengths}, width {width}, {kv_heads} KV heads, {options}, {timing} {seed}"
    wide, wide_v = widths(width)
    shapes = ((2, 4, q_len, wide), (2, kv_heads, kv_len, wide), (2, kv_heads, kv_len, wide_v))
    device = ptxsim.device("sm_90a", seed, timing, sms=SMS)
    gpu = judged(where, MASKED[name], shapes, device, dtype, **options)
    assert len(of_backward(gpu)) == backward_launches("sm_90a", kv_len, width), where


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some(draw: int) -> None:
    name = random.sample(sorted(MASKED), 2)[draw]
    close(name, (random.choice((1, 64, 130, 200)), random.choice(LENGTHS)), random.choice((40, 64, 96, 128)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("late queries", "tiles in between"))
def test_queries_that_see_nothing_have_zeros(name: str) -> None:
    close(name, (200, random.choice((100, TILE))), random.choice((64, 128)))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", (False, True))
def test_query_heads_that_share_keys(deterministic: bool) -> None:
    name, schedule = random.choice(("causal", "tiles in between")), Schedule(deterministic=deterministic)
    with in_parts(random.choice((1, 2))):
        close(name, (130, 70), 64, kv_heads=1, schedule=schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (32, 40, 64, 80, 96, 128, (96, 128), (128, 64)), ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_gradients(name: str, width: Width) -> None:
    for kv_len in LENGTHS:
        close(name, (random.choice((1, 64, 130, 200)), kv_len), width, random.choice((1, 2, 4)))
    close(name, (200, TILE), width, dtype=torch.float16, schedule=Schedule(deterministic=True))
