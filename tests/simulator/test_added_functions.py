"""Terms added to scores are in registers of a Hopper product before its fence, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SMS

import fa4flex
import ptxsim
from fa4flex import reference

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

BRANCHING: dict[str, Callable[[Any], Any]] = {
    "pow": lambda x: (x.abs() + 1) ** 0.7,
    "sin": lambda x: torch.sin(3 * x),
    "atan": lambda x: torch.atan(x),
    "log1p": lambda x: torch.log1p(x.abs()),
}


LONG = ("pow", "sin")  # to compile


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.exhaustive if x in LONG else ()) for x in BRANCHING]
)
def test_functions_with_branches(name: str) -> None:
    def added(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + BRANCHING[name]((q * kv) * 0.01)

    q, k, v = (torch.randn(1, 2, length, 64).bfloat16() for length in (130, 200, 200))
    attn = fa4flex.compile(score_mod=added)
    with ptxsim.device("sm_90a", sms=SMS) as gpu:
        out = attn(q, k, v)
    exact, _ = reference.attention(*(x.double() for x in (q, k, v)), score_mod=added)
    assert not gpu.findings, gpu.report()
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
