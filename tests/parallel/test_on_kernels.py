"""Context parallelism whose rectangles the Hopper kernels compute, on a simulated chip."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import gradients, no_worse
from ranks import Threads, on_ranks
from torch import Tensor

import fa4flex
from fa4flex import simulator
from fa4flex import variants as v
from fa4flex.parallel import ContextParallel, Layout
from fa4flex.runtime import ops

OF: Any = ("queries", "keys", "keys")
RANKS, TOKENS, HEADS, KV_HEADS, D = 2, 300, 4, 2, 64


def one_at_a_time(call: Any, lock: Any) -> Any:
    """The simulated chip takes one call after another; ranks are threads."""

    def locked(*given: Any, **more: Any) -> Any:
        with lock:
            return call(*given, **more)

    return locked


def rounded(call: Any) -> Any:
    """In float64, but for results, which kernels write in 16 bits."""

    def round_results(*given: Any) -> Any:
        found = call(*given)
        if isinstance(found, list):
            return [x.bfloat16().double() for x in found]
        return found[0].bfloat16().double(), *found[1:]

    return round_results


def spread(
    attn: fa4flex.Attention, qkv: list[Tensor], dout: Tensor, layout: Layout, wrapped: Any
) -> list[Tensor]:
    """Output, log-sum-exp, dq, dk and dv, whole, of ranks that hold parts of the tokens."""

    def run(links: Threads) -> tuple[Any, list[Tensor]]:
        cp = ContextParallel(attn.variant, links, layout)
        at = cp.placement((qkv[0].shape[2], TOKENS))
        assert bool(at.splits) == (layout.guests == "always")
        own = [at.shard(x, links.rank, of=of).clone().requires_grad_() for x, of in zip(qkv, OF, strict=True)]
        out, lse = cp(*own, return_lse=True)
        return at, [out, lse, *gradients((out,), own, [at.shard(dout, links.rank)])]

    with patch.multiple(ops, forward=wrapped(ops.forward), backward=wrapped(ops.backward)):
        found = on_ranks(RANKS, run)
    at = found[0][0]
    return [at.unshard([x[1][i] for x in found], of=of) for i, of in enumerate((*OF[:1] * 2, *OF))]


def alone(attn: fa4flex.Attention, qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse = attn(*leaves, return_lse=True)
    return [out, lse, *gradients((out,), leaves, [dout])]


def in_parts(errors: Tensor) -> list[float]:
    """Largest error of each head's part of 30 tokens: as many draws."""
    return [part.abs().max().item() for head in errors[0] for part in head.split(30)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "layout"),
    [(TOKENS, Layout(tile=64)), (60, Layout(tile=64, guests="always", sm_margin=0))],
    ids=("keys that move", "queries that visit"),
)
def test_ranks_are_as_exact_as_the_same_maths(queries: int, layout: Layout) -> None:
    """A part is rounded to 16 bits before it is merged: errors are at most twice those of exact parts that
    are rounded so, or of one process."""
    sizes = (HEADS, queries), (KV_HEADS, TOKENS), (KV_HEADS, TOKENS)
    qkv = [torch.randn(1, heads, tokens, D).bfloat16() for heads, tokens in sizes]
    dout = torch.randn_like(qkv[0])
    attn = fa4flex.compile(v.alibi, v.causal, sinks=torch.randn(HEADS))
    wide = [x.double() for x in qkv]
    exact = alone(attn, wide, dout.double())
    same = [x.bfloat16() for x in spread(attn, wide, dout.double(), layout, rounded)]
    lock = threading.Lock()
    with simulator.device("sm_90a") as gpu:
        one = alone(attn, qkv, dout)
        found = spread(attn, qkv, dout, layout, lambda call: one_at_a_time(call, lock))
    assert not gpu.findings, gpu.report()
    for number, (result, alike, parts, true) in enumerate(zip(found, one, same, exact, strict=True)):
        error, *theirs = (in_parts(x.double() - true) for x in (result, alike, parts))
        if number == 1:  # log-sum-exps, in float32 but for the same maths
            theirs = theirs[:1]
        no_worse([[x] for x in error], [[max(both)] for both in zip(*theirs, strict=True)])
