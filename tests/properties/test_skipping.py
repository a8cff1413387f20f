"""Tiles that `Precision(skip=...)` leaves out never cost more than it says: outputs, log-sum-exps and
gradients of random scores, masks, maps, sinks and groups of heads.

FA4FLEX_RANDOM_SKIPS: how many heads with scores of their own are drawn.
"""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
from skip_cases import KINDS, Case, drawn
from torch import Tensor

HEADS = int(os.environ.get("FA4FLEX_RANDOM_SKIPS", "10000"))
PARTS = 10
"""Tests that draw as many heads together, each in its time."""


def rounding(case: Case, size: Tensor) -> Tensor:
    """Errors of sums of so large numbers besides: their probabilities have the scores' last digits."""
    top = case.scores.masked_fill(~case.allowed, 0).abs().amax(-1, keepdim=True) + 1
    return 64 * torch.finfo(torch.float64).eps * top * (size + 1)


def passed_by(case: Case, counts: bool = True) -> tuple[float, float, float]:
    """(most of the error as a share of the bound, the same of the lse, share of keys that is left out)."""
    out, lse = case.variant()(case.q, case.k, case.v, return_lse=True)
    exact, exact_lse = case.exact()
    bound, some = case.bound(), exact_lse > -math.inf
    error = (out.double() - exact).abs()
    rounded = rounding(case, exact.abs()) + (1e-6 * (exact.abs() + 1) if out.dtype == torch.float32 else 0)
    assert bool((error <= bound + rounded).all()), ((error - bound - rounded).max(), case)
    assert torch.equal(lse == -math.inf, ~some)
    below = (exact_lse - lse)[some]
    lowest = -math.log1p(-case.skip)
    slack = rounding(case, torch.zeros(()))[..., 0].expand(some.shape)[some]
    assert bool((below >= -slack).all()) and bool((below <= lowest + slack).all()), (below, case)
    share = case.variant().skipped(case.q, case.k, case.v) if counts else torch.zeros(1)
    ratios = (error - rounded).clamp(min=0) / bound.clamp(min=1e-30)
    return float(ratios.max()), float(below.max()) / lowest if len(below) else 0.0, float(share.mean())


def run(heads: int) -> tuple[float, float, int]:
    draw, done, most, of_lse, left = random.Random(torch.initial_seed()), 0, 0.0, 0.0, 0
    while done < heads:
        case = drawn(draw)
        error, below, share = passed_by(case, heads <= 300 or draw.random() < 0.2)
        most, of_lse, left, done = max(most, error), max(of_lse, below), left + (share > 0), done + case.heads
    return most, of_lse, left


def test_no_error_passes_its_bound(seed: int) -> None:
    most, of_lse, left = run(300)
    assert left and 0 < most <= 1 and 0 < of_lse <= 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_error_of_ten_thousand_heads_passes_its_bound(part: int, seed: int) -> None:
    most, of_lse, left = run(HEADS // PARTS)
    assert left and 0.1 < most <= 1 and 0.1 < of_lse <= 1


def test_the_bound_is_attained(seed: int) -> None:
    """One key has all values of one sign, and all others those of the other and just what may be left out."""
    keys, skip = 64, 0.1
    bias = torch.full((1, 1, 1, keys), math.log(skip / keys) - 1e-9, dtype=torch.float64)
    bias[..., -1] = 0
    v = -torch.ones(1, 1, keys, 4, dtype=torch.float64)
    v[:, :, -1] = 1
    q, k = torch.zeros(1, 1, 1, 4, dtype=torch.float64), torch.zeros(1, 1, keys, 4, dtype=torch.float64)
    case = Case(q, k, v, bias, torch.ones_like(bias, dtype=torch.bool), None, skip, (1, 1))
    error, below, share = passed_by(case)
    assert error > 0.85 and below > 0.85 and share == (keys - 1) / keys


def test_less_is_left_out_of_smaller_shares(seed: int) -> None:
    draw = random.Random(seed)
    case, skips = drawn(draw, "local"), (0.0, 1e-9, 1e-6, 1e-3, 1e-1, 0.9)
    shares = [float(case.variant(skip).skipped(case.q, case.k, case.v).mean()) for skip in skips]
    assert shares == sorted(shares) and shares[0] == 0


@pytest.mark.parametrize("kind", ["constant", "flat"])
def test_flat_heads_leave_out_nothing(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    case = drawn(draw, "constant")
    case = case._replace(allowed=torch.ones_like(case.allowed), skip=1e-2)
    if kind == "flat":
        case = case._replace(bias=torch.randn(case.bias.shape, dtype=case.bias.dtype))
    assert not case.variant().skipped(case.q, case.k, case.v).any()
    plain, own = (case.variant(skip)(case.q, case.k, case.v) for skip in (0.0, case.skip))
    torch.testing.assert_close(plain, own)


def gradients(case: Case, skip: float, upstream: tuple[Tensor, Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, case.bias)]
    case = case._replace(q=leaves[0], k=leaves[1], v=leaves[2], bias=leaves[3])
    out, lse = case.variant(skip)(case.q, case.k, case.v, return_lse=True)
    some = lse > -math.inf
    dout, dlse = upstream
    loss = (out * dout).sum() + torch.where(some, lse * dlse, 0).sum()
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_gradients_keep_the_bounds_of_the_docs(kind: str | None, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        case = drawn(draw, kind)
        case = case._replace(**{name: getattr(case, name).double() for name in ("q", "k", "v", "bias")})
        case = case._replace(sinks=None if case.sinks is None else case.sinks.double())
        eps, group = case.skip, case.q.shape[1] // case.k.shape[1]
        dout, dlse = (torch.randn(*case.q.shape[:3], n).double() for n in (case.v.shape[3], 1))
        dlse = dlse.squeeze(-1)
        exact, own = (gradients(case, skip, (dout, dlse)) for skip in (0.0, eps))
        # Scores' gradients are those of the bias: the sum of their errors over a row.
        dp = dout @ case.v.repeat_interleave(group, 1).mT
        most, least = (
            torch.where(case.allowed, dp, -math.inf).amax(-1),
            torch.where(case.allowed, dp, math.inf).amin(-1),
        )
        if case.sinks is not None:
            most, least = most.clamp(min=0), least.clamp(max=0)
        rows = case.allowed.any(-1)
        wide = torch.where(rows, most - least, 0)
        bound = eps * (2 - eps) / (1 - eps) * wide + eps / (1 - eps) * dlse.abs()
        of_scores = (own[3] - exact[3]).abs().sum(-1)
        slack = 1e-10 * (1 + wide + dlse.abs()) * (1 + case.bias.abs().amax())
        assert bool((of_scores <= bound + slack).all()), (of_scores - bound, case)
        p = (case.scores - case.exact()[1].masked_fill(~rows, 0).unsqueeze(-1)).exp()
        of_v = eps / (1 - eps) * (p.mT @ dout.abs()).unflatten(1, (-1, group)).sum(2)
        slack = 1e-9 * (1 + of_v) * (1 + case.bias.abs().amax())
        assert bool(((own[2] - exact[2]).abs() <= of_v + slack).all())
