"""Gradients by this library's generated Hopper kernels on the simulated GPU: right, and nothing found."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.sinks import Sinks
from fa4flex.variants import alibi, causal, document, sliding_window, softcap

IDS = torch.arange(200) // 70
COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(60)},
    "documents": {"mask": document(IDS) & causal},
    "empty rows": {"mask": lambda b, h, q, k: (q >= k) & (q % 64 < 40)},
    "unseen keys": {"mask": lambda b, h, q, k: (k >= 128) & ((h != 1) | (k >= 190))},
    "sinks": {"mask": causal, "sinks": Sinks(torch.randn(4))},
}


def gradients(attn: fa4flex.Attention, qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in qkv]
    out, lse = attn(*inputs, return_lse=True)
    lse = torch.where(lse == -math.inf, 0.0, lse)
    total = (out * dout.to(out.dtype)).sum() + (lse * dlse.to(lse.dtype)).sum()
    return list(torch.autograd.grad(total, inputs))


def rounded(qkv: tuple[Tensor, ...], dout: Tensor) -> list[float]:
    """The largest errors of plain attention's gradients in 16-bit PyTorch, by input, relative to the largest
    gradient."""
    found = []
    for dtype in (qkv[0].dtype, torch.float64):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv)
        ratio = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(ratio, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
        out = scores.softmax(-1) @ v.repeat_interleave(ratio, 1)
        found.append(torch.autograd.grad(out, (q, k, v), dout.to(dtype)))
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True)]


def close(
    name: str,
    q_len: int,
    kv_len: int,
    width: int | tuple[int, int],
    arch: str = "sm_90a",
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """At most twice 16-bit PyTorch's error, relative to the largest gradient. width: of q and k, and of v."""
    composition = COMPOSED[name]
    timing, seed = random.choice([("eager", 0), ("late", 1), ("random", random.randrange(99))])
    where = f"{name}, {q_len} x {kv_len}, width {width}, {kv_heads} heads of keys, {arch}, {timing} {seed}"
    wide, wide_v = width if isinstance(width, tuple) else (width, width)
    sizes = ((4, q_len, wide), (kv_heads, kv_len, wide), (kv_heads, kv_len, wide_v))
    qkv = tuple(torch.randn(1, *size).to(dtype) for size in sizes)
    dout, dlse = torch.randn(1, 4, q_len, wide_v).to(dtype), torch.randn(1, 4, q_len)
    attn = fa4flex.compile(**composition)
    with fa4flex.simulator.device(arch, seed, timing) as gpu:
        got = gradients(attn, qkv, dout, dlse)
    assert len(gpu.results) == 4 and not gpu.findings, f"{where}: {gpu.report()}"
    exact = gradients(fa4flex.compile(**composition), tuple(x.double() for x in qkv), dout, dlse)
    for x, y, error in zip(got, exact, rounded(qkv, dout), strict=True):
        assert (x.double() - y).abs().max() <= 2 * error * y.abs().max(), where


@pytest.mark.parametrize("name", random.sample(sorted(COMPOSED), 2))
def test_some_gradients(name: str) -> None:
    close(name, random.choice((64, 130, 200)), 200, random.choice((40, 64, 128)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (40, 64, 128))
@pytest.mark.parametrize("name", COMPOSED)
def test_gradients(name: str, width: int) -> None:
    close(name, 200, 200, width)


def test_what_kernels_do_not_do_is_done_in_pytorch() -> None:
    """Outputs in another dtype than q: the forward pass is a launch, gradients are none."""
    attn = fa4flex.compile(mask=causal, precision=Precision(output=torch.float16))
    qkv = tuple(torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3))
    dout, dlse = torch.randn(1, 2, 70, 64).bfloat16(), torch.randn(1, 2, 70)
    with fa4flex.simulator.device("sm_90a") as gpu:
        got = gradients(attn, qkv, dout, dlse)
    assert len(gpu.results) == 1
    exact = gradients(attn, tuple(x.double() for x in qkv), dout, dlse)
    for x, y, error in zip(got, exact, rounded(qkv, dout), strict=True):
        assert (x.double() - y).abs().max() <= 2 * error * y.abs().max()
