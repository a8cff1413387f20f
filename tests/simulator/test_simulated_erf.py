"""erf as a score mod uses it, from the oracle to simulated chips: what a row of ops.py is worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_cases import Grid, scored
from helpers import agree, leaf

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from cuda.bindings import driver as cuda
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_tensor
from kernels.case import compile_for
from test_simulated_captured import right
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import reference
from fa4flex.kernels.common import math

ARCHS = ("sm_90a", "sm_100a")
THREADS = 128


def capped(grid: Grid, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], list[Tensor]]:
    """A cap on scores, and a learned slope inside it for each key."""
    return scored(
        lambda s, b, h, q, k, t: 3.0 * torch.erf(s * t[h, k]) + torch.erf(t[h, k]),
        leaf(grid.heads, grid.kv_len, dtype=dtype),
    )


def test_on_a_cpu() -> None:
    """Results, and gradients of q, k, v and the slopes, are the oracle's."""
    grid = Grid(2, 4, 33, 47)
    composition, slopes = capped(grid, torch.float64)
    qkv = [leaf(grid.batch, heads, length, 8) for heads, length in ((4, 33), (2, 47), (2, 47))]
    found = fa4flex.compile(**composition)(*qkv, return_lse=True)
    agree(found, reference.attention(*qkv, **composition), [*qkv, *slopes])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_on_a_simulated_chip(arch: str) -> None:
    """Forward and backward kernels are as near to the oracle as PyTorch's arithmetic in bfloat16."""
    grid = Grid(1, 2, 70, 129)
    right("erf", *capped(grid), grid, 64, arch)


class Erf:
    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        self.device(x, y).launch(grid=[x.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor) -> None:
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        y[i] = math.erf(x[i])


@pytest.mark.parametrize("arch", ARCHS)
def test_units_in_the_last_place(arch: str) -> None:
    """Numbers of every size, most where erf bends and the polynomials meet."""
    tiny = torch.rand(6_000).exp2() * 2.0 ** -torch.arange(6_000.0).remainder(140)
    special = torch.tensor([0.0, 1.0, 4.0, 8.0, 100.0, 1e10, 3e38, torch.inf, torch.nan])
    given = torch.cat([torch.rand(12_000) * 4.5, 1 + torch.randn(4_000) / 1000, tiny, special])
    x = torch.cat([given, -given])
    x = torch.nn.functional.pad(x, (0, -len(x) % THREADS))
    y = torch.full_like(x, 7.0)
    count = cute.sym_int32(divisibility=THREADS)
    with ptxsim.device(arch) as gpu:
        compile_for(arch, Erf(), *(make_fake_tensor(Float32, (count,), (1,)) for _ in range(2)))(x, y)
    assert len(gpu.results) == 1 and not gpu.findings, gpu.report()
    exact = torch.erf(x.double())
    unit = 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 23)
    error = (y.double() - exact).abs() / unit
    assert torch.equal(y.isnan(), x.isnan()) and error.nan_to_num().max() <= 2, error.nan_to_num().max()
    assert torch.equal(y.signbit() | x.isnan(), x.signbit() | x.isnan()) and y.nan_to_num().abs().max() == 1
