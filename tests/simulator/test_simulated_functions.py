"""The device function of every operation's row, as its PTX computes it, against torch in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from cuda.bindings import driver as cuda
from cutlass import Float32, cute, range_constexpr
from cutlass.cute.runtime import make_fake_tensor
from kernels.case import compile_for

import ptxsim
from fa4flex.codegen.ops import OPS
from fa4flex.kernels.common import math

ROWS = tuple(row for row in OPS.values() if (row.takes, row.arity) == ("float", 1) and row.device)
THREADS = 128
CLOSE = 2.0**-22
"""Relative error; near 0 too, where a sum with a constant would have lost the digits. The simulator rounds
approximate instructions exactly: tests/ptxsim/test_approx.py says what a chip may do."""


class Functions:
    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        self.device(x, y).launch(grid=[x.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor) -> None:
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        for j in range_constexpr(len(ROWS)):
            y[j, i] = getattr(math, ROWS[j].device)(x[i])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_functions(arch: str) -> None:
    """From large numbers to small ones, and outside of domains, where both are NaN."""
    small = 2.0 ** -torch.arange(2.0, 34.0)
    few = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, 30.0, -30.0, torch.nan])
    x = torch.cat([torch.linspace(-5, 5, 952), small, -small, few])
    y, count = torch.zeros(len(ROWS), len(x)), cute.sym_int32(divisibility=THREADS)
    given = make_fake_tensor(Float32, (count,), (1,))
    results = make_fake_tensor(Float32, (len(ROWS), count), (cute.sym_int64(), 1))
    with ptxsim.device(arch) as gpu:
        compile_for(arch, Functions(), given, results)(x, y)
    assert len(gpu.results) == 1 and not gpu.findings, gpu.report()
    for row, got in zip(ROWS, y.double(), strict=True):
        wanted = getattr(torch, row.torch[0])(x.double())
        right = ((got - wanted).abs() <= CLOSE * wanted.abs()) | (got == wanted)
        wrong = ~(right | (got.isnan() & wanted.isnan()))
        assert not wrong.any(), f"{row.name} of {x[wrong][:5]} gave {got[wrong][:5]}, not {wanted[wrong][:5]}"
