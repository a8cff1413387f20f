"""Precision(qk=...) on a simulated Hopper: kernels of 16 bits compute what codes stand for, both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Precision, quantize, reference


def exact(x: list[Tensor], weights: Tensor) -> Any:
    """out, lse and gradients of dense float64 at what codes of bfloat16 tensors stand for."""
    with torch.no_grad():
        numbers = quantize(*x).dequantize()
    q, k, v = (t.detach().double().requires_grad_() for t in x)
    mean = k.mean(2, keepdim=True)
    of_q, of_k, of_v = (
        t + (n.double() - t).detach() for n, t in ((numbers.q, q), (numbers.k, k - mean), (numbers.v, v))
    )
    bias = (q * mean).sum(-1) / 8

    def shifted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[b, h, q_idx]

    out, lse = reference.attention(of_q, of_k, of_v, shifted)
    return out, lse, torch.autograd.grad((out * weights).sum() + lse.sin().sum(), (q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_passes(dtype: torch.dtype, seed: int) -> None:
    """float32 tensors are multiplied in bfloat16, and give float32 results."""
    x = [
        (torch.randn(1, h, 64, 64) + m).bfloat16().to(dtype).requires_grad_()
        for h, m in ((2, 0), (1, 2), (1, 0))
    ]
    weights = torch.randn(1, 2, 64, 64).bfloat16()
    attn = fa4flex.compile(precision=Precision(qk="int8", pv="float8_e4m3"))
    with ptxsim.device("sm_90a", 0, "late", 3) as gpu:
        out, lse = attn(*x, return_lse=True)
        found = torch.autograd.grad((out * weights.to(dtype)).sum() + lse.sin().sum(), x)
    assert sum("fwd_sm90" in result.kernel for result in gpu.results) == 1
    assert sum("bwd_sm90" in result.kernel for result in gpu.results) == 1
    wanted, of_rows, gradients = exact(x, weights.double())
    assert out.dtype == dtype and lse.dtype == torch.float32
    for mine, theirs in ((out, wanted), (lse, of_rows), *zip(found, gradients, strict=True)):
        error = (mine.double() - theirs).square().mean().sqrt()
        assert error <= 2**-6 * theirs.square().mean().sqrt()
