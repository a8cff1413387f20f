"""Gradients by this library's generated Blackwell kernels on a simulated B200: right, and nothing found."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import Width
from test_simulated_backward import COMPOSED, close

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.dispatch import plan_backward
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM100A

WIDE = ((192, 128), (160, 128), (136, 72), (192, 32))
WIDEST = (256, 200, (192, 192), (256, 64), (64, 256), (208, 136))
WIDTHS = (24, 40, 64, 96, 128, (64, 128), (128, 32), *WIDE, *WIDEST)
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_gradients(draw: int) -> None:
    name = random.sample(sorted(COMPOSED), 2)[draw]
    kv_heads, dtype = random.choice((1, 2, 4)), random.choice(HALVES)
    lengths = random.choice(((7, 9), (64, 200), (130, 128), (200, 129)))
    close(name, *lengths, random.choice(WIDTHS), "sm_100a", kv_heads, dtype)


@pytest.mark.slow
def test_some_wide_gradients() -> None:
    """Whose scores, dP and dQ take turns in tensor memory."""
    lengths = random.choice(((9, 7), (200, 129), (330, 130)))
    kv_heads, dtype = random.choice((1, 2, 4)), random.choice(HALVES)
    name = random.choice(sorted(COMPOSED.keys() - {"documents"}))
    close(name, *lengths, random.choice(WIDE), "sm_100a", kv_heads, dtype)


@pytest.mark.slow
def test_some_gradients_of_two_kernels() -> None:
    """dV has one of its own, which computes the scores again."""
    lengths = random.choice(((9, 7), (200, 129), (130, 200)))
    kv_heads, dtype = random.choice((1, 2, 4)), random.choice(HALVES)
    name = random.choice(sorted(COMPOSED.keys() - {"documents"}))
    close(name, *lengths, random.choice(WIDEST), "sm_100a", kv_heads, dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_gradients(name: str, width: Width) -> None:
    close(name, 200, 200, width, "sm_100a")


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(7, 9), (129, 200), (128, 128), (200, 64)])
@pytest.mark.parametrize("kv_heads", (1, 4))
@pytest.mark.parametrize("dtype", HALVES)
def test_lengths_and_heads(lengths: tuple[int, int], kv_heads: int, dtype: torch.dtype) -> None:
    close(random.choice(sorted(COMPOSED)), *lengths, random.choice(WIDTHS), "sm_100a", kv_heads, dtype)


@pytest.mark.parametrize("problem", [Problem(264, 128), Problem(128, 264), Problem(512, 512)])
def test_what_there_is_no_kernel_for(problem: Problem) -> None:
    with pytest.raises(UnsupportedError, match=r"a backward kernel for sm_100a: heads of"):
        plan_backward(Facts(), problem, SM100A)
