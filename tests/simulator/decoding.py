"""Calls with few query rows, on the simulated GPU and beside the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import drawn_timing
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.kernels.plan import splitting

SIMULATED = {"chip": "sm_90a"}
"""Simulated GPU that calls run on."""

ALWAYS_ON_BOTH = pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"], indirect=True)
"""Mark of tests that run on Blackwell by default, too."""


@pytest.fixture(params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.exhaustive)])
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chip of SIMULATED while a test runs."""
    monkeypatch.setitem(SIMULATED, "chip", request.param)
    return str(request.param)


@dataclass(frozen=True)
class Size:
    """Query heads, KV heads, queries, keys, width."""

    heads: int = 4
    kv_heads: int = 1
    q_len: int = 1
    kv_len: int = 150
    d: int = 64
    batch: int = 1


def drawn(size: Size, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    s = size
    shapes = (s.batch, s.heads, s.q_len, s.d), *[(s.batch, s.kv_heads, s.kv_len, s.d)] * 2
    return [torch.randn(shape).to(dtype) for shape in shapes]


def split_in(monkeypatch: pytest.MonkeyPatch, count: int, even: int | None = None) -> None:
    """Splits of the keys, at most as many as tiles: `even` of batches of which the device finds that they
    are."""

    def splits(pairs: int, tiles: int, *more: Any) -> tuple[int, int]:
        return min(count, tiles), min(count if even is None else even, tiles)

    monkeypatch.setattr(splitting, "_splits", splits)


def attend(attn: fa4flex.Attention, *qkv: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a random timing; nothing may be found."""
    timing, seed = drawn_timing()
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"], seed, timing) as gpu:
        out, lse = attn(*qkv, return_lse=True, **more)
    assert any("decode" in result.kernel for result in gpu.results), "another kernel was launched"
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def check(attn: fa4flex.Attention, qkv: list[Tensor], **more: Any) -> None:
    """Errors are within twice those of the same maths in PyTorch at this dtype; rows without keys are
    zeros."""
    out, lse = attend(attn, *qkv, **more)
    exact, exact_lse = attn(*(x.double() for x in qkv), return_lse=True, **more)
    allowed = 2 * max(plain_error(qkv), rounding(qkv[0].dtype) * exact.abs().max().item())
    assert (out.double() - exact).abs().max().item() <= allowed
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (lse.double() - exact_lse)[~empty].abs().max().item() <= 1e-4 if not empty.all() else True
    assert not out[empty].any()


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def plain_error(qkv: list[Tensor]) -> float:
    attention: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
    exact = attention(*(x.double() for x in qkv), enable_gqa=True)
    return (attention(*qkv, enable_gqa=True).double() - exact).abs().max().item()
