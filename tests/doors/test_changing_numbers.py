"""Numbers of primitives that change from one compiled step to the next: right without graph breaks, and where
kernels take the number as an argument, in one graph for all values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fa4flex
from fa4flex import Dropout, Precision
from fa4flex.variants import causal, relu_squared, sigmoid_attention, silu_attention, softcap, softmax_plus

NUMBERS = [3.0, 4.5, 5.25, 6.125]
STEPS: dict[str, tuple[Callable[[float], dict[str, Any]], bool]] = {
    "scale": (lambda x: {"scale": x, "mask": causal}, True),
    "softcap": (lambda x: {"score_mod": softcap(x)}, True),
    "captured": (
        lambda x: {"score_mod": lambda s, b, h, q_idx, kv_idx: s - x * (q_idx - kv_idx).abs()},
        True,
    ),
    "sigmoid": (lambda x: {"normalizer": sigmoid_attention(x)}, True),
    "relu squared": (lambda x: {"normalizer": relu_squared(x)}, True),
    "silu": (lambda x: {"normalizer": silu_attention(x)}, True),
    "softmax plus": (lambda x: {"normalizer": softmax_plus(x)}, False),
    "skip": (lambda x: {"precision": Precision(skip=x / 50)}, False),
    "rate of dropout": (lambda x: {"dropout": Dropout(x / 20, 7)}, False),
}
"""Options of a number, and whether one graph serves all numbers after the first."""


@pytest.mark.parametrize("name", STEPS)
def test_numbers_that_change(name: str, seed: int) -> None:
    options, shared = STEPS[name]
    q, k, v = (torch.randn(1, 2, 48, 16) for _ in range(3))

    def step(x: float) -> torch.Tensor:
        return fa4flex.attention(q, k, v, **options(x))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for x in NUMBERS:
        torch.testing.assert_close(compiled(x), step(x), rtol=0, atol=1e-6)
    assert not shared or counter.frame_count == 2
