"""Primitives that meet after the softmax, in pairs, on simulated GPUs: by kernels where these have both, else
by PyTorch operations on the device, which explanations say."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import drawn_timing
from skip_cases import KINDS
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Dropout, Precision, reference
from fa4flex.runtime import blockwise
from fa4flex.variants import causal, sigmoid_attention, softpick

CHIPS = pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
SKIP = 0.1
KEYS = 500


@contextlib.contextmanager
def told(chip: str) -> Iterator[list[str]]:
    """Within, calls run on a simulated GPU; names of what was computed in PyTorch operations there."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        made = getattr(blockwise, name)

        def call(*given: Any) -> Any:
            calls.append(name)
            return made(*given)

        return patch.object(blockwise, name, call)

    timing, number = drawn_timing()
    with noting("forward_on_gpu"), noting("backward_on_gpu"), ptxsim.device(chip, number, timing, 2) as gpu:
        yield calls
    assert not gpu.findings, gpu.report()


def sixteen(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.slow
@CHIPS
@pytest.mark.parametrize("dropout", [None, Dropout(0.4, 11)], ids=["all", "dropout"])
@pytest.mark.parametrize("rows", [130, 3])
def test_statistics_and_dropout_beside_skipping(
    chip: str, rows: int, dropout: Dropout | None, seed: int
) -> None:
    """Largest scores are exact, and outputs and entropies keep their bounds, of scores of every kind."""
    draw, (q, k, v) = (
        random.Random(seed),
        (sixteen(1, h, n, 64) for h, n in ((2, rows), (1, KEYS), (1, KEYS))),
    )
    q = q * 0.2
    for kind in ("local", "huge", "sinks"):
        table = torch.stack([KINDS[kind](draw, rows, KEYS) for _ in range(2)])

        def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Tensor = table) -> Any:
            return s + table[h, q_idx, kv_idx]

        attn = fa4flex.compile(score, causal, precision=Precision(skip=SKIP), dropout=dropout)
        with torch.no_grad(), told(chip) as calls:
            out, aux = attn(q, k, v, return_aux=("lse", "max_logit", "entropy"))
        assert not calls
        exact: dict[str, Tensor] = {}
        truth, _ = reference.attention(q, k, v, score, causal, dropout=dropout, statistics=exact)
        allowed = reference.allowed_pairs(causal, (1, 2, rows, KEYS))
        bound = reference.skip_bound(SKIP, v, allowed, dropout=dropout)
        error = (out.double() - truth).abs()
        assert bool((error <= bound + 2e-2 * (1 + truth.abs())).all()), (error - bound).max()
        torch.testing.assert_close(aux.max_logit.double(), exact["max_logit"], atol=1e-3, rtol=1e-4)
        off = SKIP * math.log(KEYS) - SKIP * math.log(SKIP) - (1 - SKIP) * math.log1p(-SKIP)
        assert float((aux.entropy - exact["entropy"]).abs().max()) <= off + 1e-3


@pytest.mark.slow
@CHIPS
@pytest.mark.parametrize("normalizer", [sigmoid_attention, softpick])
def test_dropout_of_other_weights_is_computed_blockwise(chip: str, normalizer: Any, seed: int) -> None:
    qkv = [sixteen(1, h, n, 64).requires_grad_() for h, n in ((2, 70), (1, 90), (1, 90))]
    options: dict[str, Any] = {"normalizer": normalizer(), "dropout": Dropout(0.4, seed)}
    attn, upstream = fa4flex.compile(mask=causal, **options), torch.randn(1, 2, 70, 64)
    with told(chip) as calls:
        out = attn(*qkv)
        found = torch.autograd.grad((out * upstream.bfloat16()).sum(), qkv)
    assert calls == ["forward_on_gpu", "backward_on_gpu"]
    truth, _ = reference.attention(*qkv, None, causal, **options)
    wanted = torch.autograd.grad((truth * upstream.bfloat16()).sum(), qkv)
    for mine, true in zip((out, *found), (truth, *wanted), strict=True):
        torch.testing.assert_close(mine.double(), true.double(), atol=2e-2, rtol=2e-2)
    assert "PyTorch operations" in str(attn.explain(128, arch=chip))


@pytest.mark.slow
@CHIPS
def test_gradients_of_the_entropy_beside_dropout(chip: str, seed: int) -> None:
    """The forward kernel has both, no backward kernel has."""
    qkv = [sixteen(1, h, n, 64).requires_grad_() for h, n in ((2, 140), (1, 150), (1, 150))]
    dropout = Dropout(0.4, seed)
    attn, upstream = fa4flex.compile(mask=causal, dropout=dropout), torch.randn(1, 2, 140)
    with told(chip) as calls:
        out, aux = attn(*qkv, return_aux=("entropy",))
        found = torch.autograd.grad((aux.entropy * upstream).sum() + out.sum(), qkv)
    assert calls == ["backward_on_gpu"]
    exact: dict[str, Tensor] = {}
    truth, _ = reference.attention(*qkv, None, causal, dropout=dropout, statistics=exact)
    wanted = torch.autograd.grad((exact["entropy"] * upstream).sum() + truth.sum(), qkv)
    torch.testing.assert_close(aux.entropy.double(), exact["entropy"], atol=2e-4, rtol=1e-4)
    for mine, true in zip((out, *found), (truth, *wanted), strict=True):
        torch.testing.assert_close(mine.double(), true.double(), atol=3e-2, rtol=3e-2)
    statistics = ("lse", "entropy")
    assert "PyTorch operations" in str(attn.explain(140, arch=chip, statistics=statistics))
