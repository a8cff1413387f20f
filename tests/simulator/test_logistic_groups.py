"""Logistic weights on a simulated Hopper GPU: each way that a group of scores may take, and what it costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Normalizer, Precision
from ptxsim.run.counts import by_warp

KEYS, WIDTH = 128, 64
SCORES = KEYS // 2
"""Scores that a thread has of a tile of keys, in two groups."""
SHIFT = 9.0

Call = tuple[Tensor, int]
"""Output, and special functions that each thread computed."""


def small(score: Any, *_: Any) -> Any:
    return torch.sigmoid(score - SHIFT)


def even(score: Any, *_: Any) -> Any:
    return torch.nn.functional.silu(score)


def rows(second: float) -> Tensor:
    """Factors of scores: 1 in the first of a thread's two rows, `second` in the other."""
    return torch.where(torch.arange(KEYS) % 16 < 8, 1.0, second)


def at_scores(function: Any, x: Tensor, seen: int, second: float = 1.0, **more: Any) -> Call:
    """Weights of the keys 64 * seen and on, whose scores are x in rows that are not second, as outputs."""
    dtype = more.pop("dtype", torch.bfloat16)
    q, k = torch.zeros(1, 1, KEYS, WIDTH, dtype=dtype), torch.zeros(1, 1, KEYS, WIDTH, dtype=dtype)
    v = torch.zeros(1, 1, KEYS, WIDTH, dtype=dtype)
    q[..., 0], k[..., 0] = rows(second).to(dtype), x.to(dtype)
    v[0, 0, seen * WIDTH : (seen + 1) * WIDTH] = torch.eye(WIDTH, dtype=dtype)
    attn = fa4flex.compile(
        normalizer=Normalizer.elementwise(function), precision=Precision(output=torch.float32), **more
    )
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2) as gpu:
        out = attn(q, k, v, scale=1.0)
    assert not gpu.findings, gpu.report()
    work = by_warp(gpu.results[0])
    every = sum(work.values(), Counter())["special functions"]
    return out[0, 0], every // sum("special functions" in counts for counts in work.values())


def drawn(low: float, high: float) -> Tensor:
    """Scores for one group, the ends among them."""
    x = torch.empty(KEYS // 2).uniform_(low, high)
    x[0], x[-1] = low, high
    return x[torch.randperm(len(x))].bfloat16().float()


def near(
    out: Tensor,
    function: Any,
    x: Tensor,
    seen: int,
    error: float,
    dtype: Any = torch.bfloat16,
    second: float = 1.0,
) -> None:
    """Every row has the weights, rounded to `dtype`; reciprocals that are subnormal are 0, also of large
    scores."""
    x = rows(second).double()[:, None] * x[seen * WIDTH : (seen + 1) * WIDTH].double()
    true = function(x)
    assert out.isfinite().all()
    least = torch.finfo(dtype).smallest_normal * x.abs().clamp(1.0, 200.0)
    bound = true.abs() * (error + torch.finfo(dtype).eps / 2) + least
    assert ((out.double() - true).abs() <= bound).all()


LOW, MIXED, WIDE = (-21.0, 5.0), (-20.0, 40.0), (-200.0, 40.0)
"""Scores of `small` whose weights are small, those whose products are numbers, and others."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ranges", "cost"), [((LOW, LOW), 2), ((LOW, MIXED), 2.5), ((MIXED, LOW), 2.5), ((LOW, WIDE), 3)]
)
def test_each_group_of_small_values_goes_its_way(ranges: Any, cost: float, dtype: Any, seed: int) -> None:
    x = torch.cat([drawn(*ends) for ends in ranges])
    for seen in range(2):
        out, special = at_scores(small, x, seen, 0.75, dtype=dtype)
        near(out, small, x, seen, 2**-11, dtype, 0.75)
        assert special == cost * SCORES / 2


def test_no_reciprocal_of_a_product_is_subnormal(seed: int) -> None:
    """One score of a group is so low that its own is, but for a factor of 2 or 4; that of the other row, with
    which it would share one, is so high that it weighs 1."""
    x = torch.cat([drawn(20.0, 40.0), drawn(20.0, 40.0)])
    low = int(torch.randint(KEYS, ()))
    x[low] = -79.0 if low % 2 else -78.5
    for seen in range(2):
        out, special = at_scores(small, x, seen, -0.5)
        near(out, small, x, seen, 2**-11, second=-0.5)
        assert special == 3.5 * SCORES / 2


@pytest.mark.parametrize(
    ("ranges", "cost"), [(((-4.4, 90.0), (-4.4, 4.0)), 2), (((-4.4, 4.0), (-9.0, 9.0)), 3), ((WIDE, WIDE), 4)]
)
def test_each_group_around_zero_goes_its_way(ranges: Any, cost: int, seed: int) -> None:
    x = torch.cat([drawn(*ends) for ends in ranges])
    for seen in range(2):
        out, special = at_scores(even, x, seen)
        near(out, even, x, seen, 2**-15)
        assert special == cost * SCORES / 2


@pytest.mark.parametrize("function", [small, even])
def test_the_whole_range_of_scores(function: Any, seed: int) -> None:
    """Finite, and exactly 0 far below: infinite scores of `small` too, as mods hide pairs by them."""
    x = torch.cat([torch.tensor([1e30, -1e30, 3e38, -3e38, 0.0, -0.0, 1e-30, -1e-30] * 8), drawn(*WIDE)])
    if function is small:
        x[7] = -torch.inf
    x = x[torch.randperm(KEYS)].bfloat16().float()
    for seen in range(2):
        out, _ = at_scores(function, x, seen)
        near(out, function, x, seen, 2**-11)
        assert not out[:, x[seen * WIDTH : (seen + 1) * WIDTH] <= -1e30].any()


@pytest.mark.parametrize("function", [small, even])
def test_a_hidden_score_that_is_no_number_spoils_no_neighbour(function: Any, seed: int) -> None:
    x = torch.cat([drawn(*LOW), drawn(*MIXED)])
    hidden = int(torch.randint(KEYS, ()))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx != hidden

    given = x.clone()
    given[hidden] = torch.nan
    for seen in range(2):
        out, _ = at_scores(function, given, seen, mask=mask)
        if hidden // WIDTH == seen:
            assert not out[:, hidden % WIDTH].any()
            out[:, hidden % WIDTH] = function(x[hidden]).to(out)
        near(out, function, x, seen, 2**-11)


def test_a_score_that_is_no_number_shows(seed: int) -> None:
    for function, ends in ((small, LOW), (small, MIXED), (even, (-4.0, 4.0)), (even, MIXED)):
        x = torch.cat([drawn(*ends), drawn(*ends)])
        x[int(torch.randint(KEYS, ()))] = torch.nan
        assert at_scores(function, x, 0)[0].isnan().all()
