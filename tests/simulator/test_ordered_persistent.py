"""Ordered sums of persistent blocks: turns follow the order in which tiles of keys are taken, so that nobody
waits for a tile that no block has."""

from __future__ import annotations

import random

import captured_cases
import pytest
import torch
from helpers import SMS, Width, forward_on_cpu, of_backward, widths
from test_deterministic_backward import SCALE, gradients, plain, sensitive
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.primitives.schedule import Schedule

ORDERED = Schedule(deterministic=True)
WIDTHS: tuple[Width, ...] = 64, 96, 128, (192, 128)


def simulated(timing: str, seed: int, together: int, *given: object) -> tuple[Tensor, ...]:
    """Gradients by SMS persistent blocks, of which `together` run at the same time."""
    with forward_on_cpu(), ptxsim.device("sm_90a", seed, timing, sms=SMS, together=together) as gpu:
        found = gradients(*given)  # type: ignore[arg-type]
    where = f"{timing} {seed}, {together} together"
    assert len(of_backward(gpu)) == 3 and not gpu.findings, f"{where}: {gpu.report()}"
    assert of_backward(gpu)[1].shape.grid == (SMS, 1, 1), where
    return found


def same(width: int) -> None:
    """Asserts that bits are the same under any timing, and where other blocks begin only when the first one
    has ended, which then has taken all tiles."""
    qkv, dout = sensitive(150, 700, 128, width)
    attn = fa4flex.compile(scale=SCALE, schedule=ORDERED)
    first = simulated("eager", 0, 1, attn, qkv, dout)
    for timing in ("late", "random"):
        seed = random.randrange(99)
        found = simulated(timing, seed, SMS, attn, qkv, dout)
        assert all(map(torch.equal, found, first)), f"width {width}, {timing} {seed}"


@pytest.mark.slow
def test_bits_repeat_whoever_takes_a_tile() -> None:
    same(random.choice((64, 128)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (64, 96, 128))
def test_bits_repeat_at_every_width(width: int) -> None:
    same(width)


def right(width: Width) -> None:
    """Asserts at most twice the error of the same maths in PyTorch, in bf16."""
    d, dv = widths(width)
    lengths, heads = (150, 400), (2, 1, 1)
    qkv = [torch.randn(2, h, n, x).bfloat16() for h, n, x in zip(heads, (150, 400, 400), (d, d, dv))]
    dout = torch.randn(2, 2, 150, dv).bfloat16()
    attn = fa4flex.compile(schedule=ORDERED)
    found = simulated("random", random.randrange(99), SMS, attn, qkv, dout)

    def by_hand(*qkv: Tensor, varlen: None) -> Tensor:
        return plain(None, [lengths] * 2, False, *qkv)

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        *qkv, dout = given
        exact = gradients(attn, [x.double() for x in qkv], dout)
        return list(exact), list(gradients(by_hand, qkv, dout))

    exact, budgets = captured_cases.over_draws(once, (*qkv, dout))
    captured_cases.judge(f"persistent, width {width}", found, exact, budgets)


@pytest.mark.slow
def test_gradients_of_persistent_blocks() -> None:
    right(random.choice(WIDTHS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_gradients_at_every_width(width: Width) -> None:
    right(width)
