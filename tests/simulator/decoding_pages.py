"""Calls with few query rows whose keys lie in pages, on the simulated GPU and beside the oracle."""

from __future__ import annotations

import torch
from decoding import SIMULATED
from helpers import drawn_timing
from paged_pools import Drawn, compare
from torch import Tensor

import fa4flex
import ptxsim


def attend(attn: fa4flex.Attention, given: Drawn) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a random timing; nothing may be found, and nothing else is
    launched."""
    timing, seed = drawn_timing()
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"], seed, timing) as gpu:
        out, lse = given(attn, return_lse=True)
    kernels = [result.kernel for result in gpu.results]
    assert all("decode" in name or "combine" in name for name in kernels), kernels
    assert any("decode" in name for name in kernels)
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def check(attn: fa4flex.Attention, given: Drawn) -> None:
    compare(attn, given, *attend(attn, given))
