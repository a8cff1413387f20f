"""Gradients of softpick on simulated GPUs, and scores of all sizes. Its forward passes stand among those of
other normalisers (test_simulated_normalizers.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from output_cases import Sizes, leaves
from test_simulated_normalizers import CHIPS, NARROW, blockwise_calls, right_gradients
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, reference
from fa4flex.variants import softpick


class _Softpick(torch.autograd.Function):
    """Softpick of scores times values, whose gradients are of the output that was rounded: what kernels keep
    of it. exp(score) / total, which multiplies that rounding, may be above 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, allowed: Tensor, eps: float) -> Tensor:
        kept = torch.where(allowed, scores.double(), 0.0)
        total = kept.expm1().abs().sum(-1, keepdim=True) + eps
        weights = (kept.expm1().clamp(min=0) / total).to(v.dtype)
        ctx.save_for_backward(kept, total, weights, v, out := weights @ v)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        kept, total, weights, v, out = ctx.saved_tensors
        delta = (dout.double() * out.double()).sum(-1, keepdim=True)
        moved = torch.where(kept > 0, (dout @ v.mT).double(), 0.0) - kept.sign() * delta
        dscores = torch.where(kept == 0, 0.0, kept.exp() / total * moved)
        return dscores.to(v.dtype).float(), weights.mT @ dout, None, None


def in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any, *, normalizer: Any, **rest: Any
) -> tuple[Tensor, Tensor]:
    """The same maths in the dtype of q, products and weights rounded."""
    assert rest == {"sinks": None, "output_mod": None}
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
    allowed = reference.allowed_pairs(mask, tuple(scores.shape))  # type: ignore[arg-type]
    scores = reference.modified_scores(scores.double(), allowed, score_mod)
    scores = torch.where(allowed, scores, 0.0).float()
    return _Softpick.apply(scores, v, allowed, normalizer.eps), scores.new_zeros(scores.shape[:3])


def right(chip: str, kind: str, sizes: Sizes, **more: Any) -> None:
    right_gradients(chip, kind, "softpick", sizes, by=in_pytorch, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "packed", "padded"])
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients(chip: str, kind: str, seed: int) -> None:
    right(chip, kind, NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients_of_wider_heads(chip: str, dims: tuple[int, int], seed: int) -> None:
    """Hopper's kernels for more than 128 columns do not see the signs of scores, which gradients need."""
    by_kernels = chip == "sm_100a" or dims[0] <= 128
    right(chip, "dense", Sizes(1, 1, 1, 40, 70, *dims), by_kernels=by_kernels)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_several_tiles_of_keys(dim: int, seed: int) -> None:
    """Hopper's blocks are persistent."""
    right("sm_90a", "dense", Sizes(1, 2, 1, 170, 270, dim, dim))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients_with_sums_in_order(chip: str, seed: int) -> None:
    right(chip, "dense", NARROW, schedule=Schedule(deterministic=True))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [-0.7, 1.3])
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients_of_modified_scores(chip: str, factor: float, seed: int) -> None:
    """Slopes below 0 change no sign that tells which scores have a part in the weights; a learned bias has a
    share in each score."""
    bias = leaves(torch.bfloat16)(NARROW.kv_len)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(factor * score) * 3.0 + bias[kv_idx]

    right(chip, "dense", NARROW, score_mod=mod, learned=[bias])


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, 1e-5, 1e2])
@pytest.mark.parametrize("q_len", [2, 70])
@pytest.mark.parametrize("chip", CHIPS)
def test_scores_of_all_sizes(chip: str, q_len: int, size: float, seed: int) -> None:
    """Scores of 0 weigh nothing; of small ones, weights keep their digits; of large ones, they are finite."""
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (q_len, 90, 90))
    q = (size * q).requires_grad_()
    attn = fa4flex.compile(normalizer=softpick(1e-3), scale=0.1)
    with ptxsim.device(chip, sms=2) as gpu, blockwise_calls() as calls:
        out = attn(q, k, v)
        (dq,) = torch.autograd.grad(out.float().sum(), q)
    assert not gpu.findings and not calls, gpu.report()
    wide = q.detach().double().requires_grad_()
    scores = 0.1 * wide @ k.double().mT
    u = scores.expm1()
    exact = u.relu() @ v.double() / (u.abs().sum(-1, keepdim=True) + 1e-3)
    (exact_dq,) = torch.autograd.grad(exact.sum(), wide)
    assert torch.isfinite(dq).all()
    assert (out - exact).norm() <= 0.01 * exact.norm()
    # Gradients of large scores are the small rest of numbers that nearly cancel.
    assert size > 1 or (dq - exact_dq).norm() <= 0.01 * exact_dq.norm()


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_attentions_of_other_eps_are_others(chip: str, seed: int) -> None:
    """eps is part of a kernel: what is kept of one attention does not serve another."""
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (2, 90, 90))
    u = (q.double() @ k.double().mT / 8).expm1()
    with torch.no_grad(), ptxsim.device(chip, sms=2), blockwise_calls() as calls:
        for eps in (1e-3, 500.0, 1e-3):
            out = fa4flex.compile(normalizer=softpick(eps))(q, k, v)
            exact = u.relu() @ v.double() / (u.abs().sum(-1, keepdim=True) + eps)
            assert (out - exact).norm() <= 0.01 * exact.norm(), eps
    assert not calls
