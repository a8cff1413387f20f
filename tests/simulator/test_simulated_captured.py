"""Gradients of captured tensors by the generated kernels on simulated GPUs."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from math import nan
from typing import Any
from unittest.mock import patch

import pytest
import torch
from captured_cases import CASES, Grid, gradients, judge, measured
from helpers import SMS, Width, backward_launches, drawn_timing, of_backward, widths
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.kernels.plan.captured_sums import CapturedSum
from fa4flex.runtime.cuda.launches import ready_backward
from fa4flex.runtime.cuda.launches.captured_sums import memory_of


def poisoned() -> AbstractContextManager[Any]:
    """Gradients of captured tensors are made in memory full of NaN, unless kernels rely on zeros."""

    def filled(one: CapturedSum, q: Tensor) -> Tensor:
        return memory_of(one, q).fill_(nan if one.whole else 0.0)

    return patch.object(ready_backward, "memory_of", filled)


ARCHS = ("sm_90a", "sm_100a")


def close(name: str, grid: Grid, width: Width, arch: str) -> None:
    right(name, *CASES[name](grid), grid, width, arch)


def right(
    name: str, composition: dict[str, Any], leaves: list[Tensor], grid: Grid, width: Width, arch: str
) -> None:
    timing, seed = drawn_timing()
    where = f"{name}, {grid}, width {width}, {arch}, {timing} {seed}"
    d, dv = widths(width)
    keys = grid.heads // 2, grid.kv_len
    sizes = ((grid.heads, grid.q_len, d), (*keys, d), (*keys, dv))
    qkv = [torch.randn(grid.batch, *size).bfloat16() for size in sizes]
    upstream = torch.randn(*grid[:3], dv).bfloat16(), torch.randn(grid[:3])
    attn = fa4flex.compile(**composition)
    with poisoned(), ptxsim.device(arch, seed, timing, sms=SMS) as gpu:
        got = gradients(lambda *x: attn(*x, return_lse=True), qkv, leaves, upstream)
    assert len(of_backward(gpu)) == backward_launches(arch, grid.kv_len, width), where
    assert not gpu.findings, f"{where}: {gpu.report()}"
    judge(where, got, *measured(composition, qkv, leaves, upstream))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_some_gradients(arch: str) -> None:
    name = random.choice(sorted(CASES))
    grid = Grid(1, 2, random.choice((64, 70, 130)), random.choice((64, 129)))
    close(name, grid, random.choice((64, 128, (192, 128))), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["function of a sum", "numbers of the batch and the head"])
def test_what_weights_are_made_of(name: str, arch: str) -> None:
    close(name, Grid(2, 2, 70, 64), 64, arch)


DENSE = tuple(name for name in CASES if name.startswith("dense"))


@pytest.mark.slow
def test_some_dense_gradients() -> None:
    """Tiles that no block visits are zero, and rows of any length end where they end."""
    grid = Grid(1, 2, 130, random.choice((300, 301)))
    close(random.choice(DENSE), grid, random.choice((64, 96, 192)), "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "along paths" in name])
def test_scores_of_many_reads(name: str) -> None:
    """Hopper's kernels take steps with a mask and without one by the same code."""
    close(name, Grid(1, 2, random.choice((130, 131)), 300), random.choice((64, 128)), "sm_90a")


LONG = tuple(name for name in CASES if name.startswith("long"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("arch", ARCHS)
def test_long_sums(arch: str, name: str) -> None:
    """Loops of the device: over elements of a query's and a key's vector, and over their gradients."""
    close(name, Grid(1, 2, 70, 65), 64, arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (64, 128, 192, (192, 128)), ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ARCHS)
def test_gradients(arch: str, name: str, width: Width) -> None:
    if arch == "sm_90a" or width != 192:
        close(name, Grid(2, 4, 130, 200), width, arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", ((1, 1), (63, 129), (300, 70), (70, 301)), ids=str)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("arch", ARCHS)
def test_dense_gradients(arch: str, name: str, lengths: tuple[int, int]) -> None:
    close(name, Grid(1, 2, *lengths), 64, arch)
