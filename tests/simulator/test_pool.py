"""Rows for blocks of tokens by the kernel, on simulated GPUs: as float64 makes them, as near as operations of
torch, under all timings, whatever memory held before; nothing outside the tokens is read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from paged_pools import guarded
from torch import Tensor

import ptxsim
from fa4flex import select
from fa4flex.primitives.pooled import pooled
from fa4flex.runtime.cuda import pooled_scores as kernels

TIMINGS = [("eager", 0), ("late", 1), ("random", 2)]
HOW = "mean", "sum", "max", "min"


def check(x: Tensor, block: int, how: Any, chip: str = "sm_90a") -> None:
    timing, seed = random.choice(TIMINGS)
    wanted, plain = pooled(x.double(), block, how), pooled(x, block, how)
    assert kernels.pools(x, block)
    with ptxsim.device(chip, seed, timing) as gpu:
        found = kernels.pool(x, block, how)
    assert len(gpu.results) == 1 and not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    assert found is not None and (found.shape, found.dtype) == (plain.shape, plain.dtype)
    if how in ("max", "min"):
        assert torch.equal(found, plain)
        return
    # Sums in float32 differ by their order: by less than what rounding to 16 bits does.
    error, own = (found.double() - wanted).abs(), (plain.double() - wanted).abs()
    assert error.max() <= 2 * own.max() + 1e-6 * wanted.abs().max()
    assert (found - plain).abs().max() <= torch.finfo(x.dtype).eps * plain.abs().max()


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("length", "block", "width"), [(70, 8, 64), (130, 64, 128), (33, 33, 8), (9, 1, 40), (300, 300, 256)]
)
def test_pooled_rows(length: int, block: int, width: int, how: str, chip: str) -> None:
    dtype = random.choice([torch.bfloat16, torch.float16])
    check(guarded(torch.randn(2, 3, length, width).to(dtype)), block, how, chip)


def test_rows_of_any_strides_and_odd_numbers() -> None:
    """Heads behind tokens; infinities and NaN go where operations of torch have them go."""
    x = torch.randn(1, 20, 3, 32).bfloat16().transpose(1, 2)
    check(x, 6, "mean")
    x = x.contiguous()
    x[0, 0, 3, 5], x[0, 1, 7, 2] = torch.nan, torch.inf
    with ptxsim.device("sm_90a"):
        made = {how: kernels.pool(x, 6, how) for how in HOW}  # type: ignore[arg-type]
    for how, found in made.items():
        torch.testing.assert_close(found, pooled(x, 6, how), equal_nan=True)


def test_pool_is_one_launch_with_gradients() -> None:
    """Means and sums have their gradients; other tokens than kernels read are pooled by operations."""
    x = torch.randn(1, 2, 21, 16).bfloat16().requires_grad_()
    upstream = torch.randn(1, 2, 4, 16).bfloat16()
    for how in ("mean", "sum"):
        (wanted,) = torch.autograd.grad(select.pool(x, 6, how).values, x, upstream)  # type: ignore[arg-type]
        with ptxsim.device("sm_90a") as gpu:
            made = select.pool(x, 6, how).values  # type: ignore[arg-type]
            (found,) = torch.autograd.grad(made, x, upstream)
        assert len(gpu.results) == 1 and not gpu.findings
        torch.testing.assert_close(found, wanted)
    with ptxsim.device("sm_90a") as gpu:
        for other in (x, x.detach().float(), x.detach()[..., :12], x.detach().permute(0, 1, 3, 2)[..., :8]):
            how = "max"
            assert torch.equal(select.pool(other, 6, how).values, pooled(other, 6, how))  # type: ignore[arg-type]
    assert not gpu.results


def test_one_graph_pools_by_one_operator() -> None:
    """torch.compile sees an operator, whose shapes it knows."""
    x = torch.randn(1, 2, 40, 16).bfloat16()
    torch.library.opcheck(
        torch.ops.fa4flex.pool.default, (x, 7, "max"), test_utils=("test_schema", "test_faketensor")
    )
