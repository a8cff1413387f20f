"""Gradients where tiles of keys are few for Hopper's multiprocessors: a block has half as many keys, and one
consumer warpgroup, or two that share out columns."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from captured_cases import CASES, Grid
from helpers import SMS, Width, drawn_timing, forward_on_cpu, of_backward, widths
from pairs import few_tiles
from test_grouped_backward import in_parts
from test_simulated_backward import COMPOSED, judged
from test_simulated_captured import close as close_captured

import fa4flex
import ptxsim
from fa4flex.primitives.schedule import Schedule

HEADS = 4
ALONE = 96
"""The widest heads of which blocks have one consumer warpgroup beside the producer's; then two."""
WIDTHS: tuple[Width, ...] = (32, 40, 64, 80, 96, 128, (96, 128), (128, 64))
LENGTHS = ((200, 200), (190, 129), (1, 200), (65, 190))
"""Lengths for which documents have ids."""


def close(
    name: str,
    lengths: tuple[int, int],
    width: Width,
    kv_heads: int = 2,
    sms: int | None = None,
    **options: Any,
) -> None:
    q_len, kv_len = lengths
    timing, seed = drawn_timing()
    where = f"{name}, {lengths}, width {width}, {kv_heads} KV heads, {options}, {timing} {seed}"
    wide, wide_v = widths(width)
    shapes = ((1, HEADS, q_len, wide), (1, kv_heads, kv_len, wide), (1, kv_heads, kv_len, wide_v))
    device = ptxsim.device("sm_90a", seed, timing, sms=sms)
    main = of_backward(judged(where, COMPOSED[name], shapes, device, **options))[1]
    assert main.shape.block == (128 * (2 if max(wide, wide_v) <= ALONE else 3), 1, 1), where


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some(draw: int) -> None:
    name = random.sample(sorted(COMPOSED), 2)[draw]
    close(name, random.choice(LENGTHS), random.choice(WIDTHS))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", (False, True))
def test_query_heads_that_share_keys(deterministic: bool) -> None:
    with in_parts(random.choice((1, 2))):
        close("alibi, causal", (200, 200), 64, kv_heads=2, schedule=Schedule(deterministic=deterministic))


@pytest.mark.slow
def test_a_gpu_of_fewer_multiprocessors_before() -> None:
    """Tiles are not few for that one: what was made ready for it serves no other GPU."""
    width = random.choice((32, 64))
    q, k, v = (torch.randn(1, HEADS, 130, width).bfloat16().requires_grad_() for _ in range(3))
    attn, blocks = fa4flex.compile(**COMPOSED["alibi, causal"]), []
    for sms in (SMS, None):
        with forward_on_cpu(), ptxsim.device("sm_90a", sms=sms) as gpu:
            attn(q, k, v).sum().backward()
        blocks.append(of_backward(gpu)[1].shape.block)
    assert blocks == [(384, 1, 1), (256, 1, 1)]


@pytest.mark.slow
def test_blocks_that_take_several_tiles() -> None:
    """However few multiprocessors there are."""
    with few_tiles(True):
        close(random.choice(sorted(COMPOSED)), (130, 200), random.choice((64, 128)), sms=SMS)


@pytest.mark.slow
def test_some_captured_tensors() -> None:
    with few_tiles(True):
        close_captured(
            random.choice(sorted(CASES)), Grid(1, 2, 130, 200), random.choice((64, 96, 128)), "sm_90a"
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (64, 96, 128), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_captured_tensors(name: str, width: int) -> None:
    with few_tiles(True):
        close_captured(name, Grid(1, 2, 130, 200), width, "sm_90a")


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_all(name: str, width: Width) -> None:
    for lengths in LENGTHS:
        close(name, lengths, width)
