"""Ordered sums of Hopper's pairs of CTAs: each CTA adds half of the columns of dQ, in turns of its own."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import test_deterministic_backward as ordered
import torch
from helpers import forward_on_cpu, of_backward
from pairs import hopper_pairs

import fa4flex
import ptxsim
from fa4flex.primitives.schedule import Schedule
from ptxsim.run.scheduler import Scheduler

ARCH, KEYS = "sm_90a", 128
"""Keys of a pair."""
WIDTHS = (160, 192)
KINDS = ("dense", "packed", "padded")


@pytest.mark.exhaustive
def test_sums_in_any_order_show() -> None:
    with hopper_pairs(True):
        ordered.in_any_order(ARCH, KEYS, 192)


@pytest.mark.slow
def test_bits_repeat() -> None:
    with hopper_pairs(True):
        ordered.same(ARCH, random.choice(ordered.TELLING), 1, KEYS, random.choice(WIDTHS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ordered.MASKS)
def test_bits_repeat_often(name: str) -> None:
    with hopper_pairs(True):
        ordered.same(ARCH, name, 12, KEYS, random.choice(WIDTHS))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
def test_some_gradients(pair: bool) -> None:
    with hopper_pairs(pair):
        name = random.choice(sorted(ordered.MASKS))
        ordered.right(ARCH, name, random.choice(KINDS), random.choice((*WIDTHS, (160, 192))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ordered.MASKS)
def test_gradients(name: str, kind: str, width: int, pair: bool) -> None:
    with hopper_pairs(pair):
        ordered.right(ARCH, name, kind, width)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", (1, 2))
def test_nobody_waits_for_pairs_that_have_no_multiprocessors(pairs: int) -> None:
    """However few pairs run at a time: others begin as these end, and not before."""
    name, width = random.choice(sorted(ordered.MASKS)), random.choice(WIDTHS)
    timing, seed = random.choice(ordered.timings(1))
    (q, k, v), dout = ordered.sensitive(200, 500, KEYS, width)
    attn = fa4flex.compile(
        mask=ordered.MASKS[name], scale=ordered.SCALE, schedule=Schedule(deterministic=True)
    )
    let_in = Scheduler._admit

    def as_others_end(self: Scheduler) -> bool:
        return len(self._resident) < self.together and let_in(self)

    device = ptxsim.device(ARCH, seed, timing, together=pairs)
    alone = patch.object(Scheduler, "_admit", as_others_end)
    with hopper_pairs(True), forward_on_cpu(), alone, device as gpu:
        found = ordered.gradients(attn, [q, k, v], dout)
    main = of_backward(gpu)[1].shape
    assert main.cluster == (2, 1, 1) and not gpu.findings, f"{name}, {timing} {seed}: {gpu.report()}"
    with hopper_pairs(True):
        expected, _ = ordered.simulated(ARCH, "eager", 0, attn, [q, k, v], dout)
    assert all(map(torch.equal, found, expected))
