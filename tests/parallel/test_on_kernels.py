"""Context parallelism whose rectangles the Hopper kernels compute, on a simulated chip."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import gradients
from ranks import Threads, on_ranks
from torch import Tensor

import fa4flex
from fa4flex import simulator
from fa4flex import variants as v
from fa4flex.parallel import ContextParallel, Layout
from fa4flex.runtime import ops

RANKS, TOKENS, HEADS, KV_HEADS, D = 2, 300, 4, 2, 64


def one_at_a_time(call: Any, lock: Any) -> Any:
    """The simulated chip takes one call after another; ranks are threads."""

    def locked(*given: Any, **more: Any) -> Any:
        with lock:
            return call(*given, **more)

    return locked


def whole_and_spread(attn: fa4flex.Attention, qkv: list[Tensor], dout: Tensor) -> list[list[Tensor]]:
    """Output, log-sum-exp, dq, dk and dv of one process, and of ranks that hold parts of the tokens."""

    def run(links: Threads) -> tuple[Any, list[Tensor]]:
        cp = ContextParallel(attn.variant, links, Layout(tile=64))
        at = cp.placement(TOKENS)
        own = [at.shard(x, links.rank).clone().requires_grad_() for x in qkv]
        out, lse = cp(*own, return_lse=True)
        return at, [out, lse, *gradients((out,), own, [at.shard(dout, links.rank)])]

    lock = threading.Lock()
    with simulator.device("sm_90a") as gpu:
        leaves = [x.clone().requires_grad_() for x in qkv]
        out, lse = attn(*leaves, return_lse=True)
        one = [out, lse, *gradients((out,), leaves, [dout])]
        with patch.multiple(
            ops, forward=one_at_a_time(ops.forward, lock), backward=one_at_a_time(ops.backward, lock)
        ):
            found = on_ranks(RANKS, run)
    assert not gpu.findings, gpu.report()
    at = found[0][0]
    return [one, [at.unshard([x[1][i] for x in found]) for i in range(5)]]


@pytest.mark.slow
def test_ranks_are_as_exact_as_one_process() -> None:
    """A part is rounded to 16 bits before it is merged: errors are at most twice those of one process."""
    qkv = [torch.randn(1, h, TOKENS, D).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS)]
    dout = torch.randn_like(qkv[0])
    sinks = torch.randn(HEADS)
    attn = fa4flex.compile(v.alibi, v.causal, sinks=sinks)
    wide = [x.double().requires_grad_() for x in qkv]
    out, lse = attn(*wide, return_lse=True)
    exact = [out, lse, *gradients((out,), wide, [dout.double()])]
    one, spread = whole_and_spread(attn, qkv, dout)
    for name, got, alone, true in zip(("out", "lse", "dq", "dk", "dv"), spread, one, exact, strict=True):
        error, theirs = ((x.double() - true).abs().max().item() for x in (got, alone))
        assert error <= 2 * theirs, f"{name}: {error:.2e}, one process {theirs:.2e}"
