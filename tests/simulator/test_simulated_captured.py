"""Gradients of captured tensors by the generated kernels on simulated GPUs."""

from __future__ import annotations

import random

import pytest
import torch
from captured_cases import CASES, Grid, gradients, judge, measured

import fa4flex
from fa4flex.primitives.schedule import Schedule

ARCHS = ("sm_90a", "sm_100a")


def close(name: str, grid: Grid, width: int, arch: str) -> None:
    timing, seed = random.choice([("eager", 0), ("late", 1), ("random", random.randrange(99))])
    where = f"{name}, {grid}, width {width}, {arch}, {timing} {seed}"
    composition, leaves = CASES[name](grid)
    sizes = ((grid.heads, grid.q_len), *[(grid.heads // 2, grid.kv_len)] * 2)
    qkv = [torch.randn(grid.batch, h, n, width).bfloat16() for h, n in sizes]
    upstream = torch.randn(*grid[:3], width).bfloat16(), torch.randn(grid[:3])
    attn = fa4flex.compile(**composition)
    with fa4flex.simulator.device(arch, seed, timing) as gpu:
        got = gradients(lambda *x: attn(*x, return_lse=True), qkv, leaves, upstream)
    assert len(gpu.results) == 4 and not gpu.findings, f"{where}: {gpu.report()}"
    judge(where, got, *measured(composition, qkv, leaves, upstream))


@pytest.mark.parametrize("arch", ARCHS)
def test_some_gradients(arch: str) -> None:
    name = random.choice(sorted(CASES))
    grid = Grid(1, 2, random.choice((64, 70, 130)), random.choice((64, 129)))
    close(name, grid, random.choice((64, 128)), arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ARCHS)
def test_gradients(arch: str, name: str) -> None:
    close(name, Grid(2, 4, 130, 200), 64, arch)


def test_deterministic_sums_are_made_in_pytorch() -> None:
    """Reductions in memory come in any order: no kernel is launched for gradients."""
    slopes = torch.rand(2).requires_grad_()
    composition = {"score_mod": lambda s, b, h, q, k: s + slopes[h] * (k - q)}
    attn = fa4flex.compile(**composition, schedule=Schedule(deterministic=True))
    qkv = [torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3)]
    upstream = torch.randn(1, 2, 70, 64).bfloat16(), torch.randn(1, 2, 70)
    with fa4flex.simulator.device("sm_90a") as gpu:
        got = gradients(lambda *x: attn(*x, return_lse=True), qkv, [slopes], upstream)
    assert len(gpu.results) == 1
    judge("deterministic", got, *measured(composition, qkv, [slopes], upstream))
