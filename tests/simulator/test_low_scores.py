"""Rows all of whose scores are as low as masks that are added make them: rows without keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa4flex
import ptxsim
from fa4flex import reference

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

LOW = (-1e8, -1e9, -1e10, -1e30, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows_of_low_scores_have_no_keys(arch: str) -> None:
    q_len, kv_len = 70, 200
    hidden = torch.rand(q_len, kv_len) < 0.5
    hidden[3] = hidden[40:50] = True
    hidden[60, :140] = True  # the first keys of a row are low, and then some are not
    hidden[60, 140:] = False
    low = torch.tensor(LOW)[torch.arange(q_len) % len(LOW)]
    bias = torch.where(hidden, low[:, None], 0.0)

    def added(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[q_idx, kv_idx]

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~hidden[q_idx, kv_idx]

    qkv = [torch.randn(1, 2, n, 64).bfloat16().requires_grad_() for n in (q_len, kv_len, kv_len)]
    dout = torch.randn(1, 2, q_len, 64).bfloat16()
    with ptxsim.device(arch) as gpu:
        out, lse = fa4flex.compile(added)(*qkv, return_lse=True)
        grads = torch.autograd.grad(out, qkv, dout)
    assert not gpu.findings, gpu.report()
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected, expected_lse = reference.attention(*exact, mask=seen)
    wanted = torch.autograd.grad(expected, exact, dout.double())
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)
    for got, want in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
