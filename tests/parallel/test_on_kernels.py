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
import ptxsim
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


def spread(attn: fa4flex.Attention, qkv: list[Tensor], dout: Tensor, layout: Layout) -> list[Tensor]:
    """Output, log-sum-exp, dq, dk and dv, whole, of ranks that hold parts of the tokens."""

    def run(links: Threads) -> tuple[Any, list[Tensor]]:
        cp = ContextParallel(attn.variant, links, layout)
        at = cp.placement((qkv[0].shape[2], TOKENS))
        assert bool(at.splits) == (layout.guests == "always")
        own = [at.shard(x, links.rank, of=of).clone().requires_grad_() for x, of in zip(qkv, OF, strict=True)]
        out, lse = cp(*own, return_lse=True)
        return at, [out, lse, *gradients((out,), own, [at.shard(dout, links.rank)])]

    lock = threading.Lock()
    with patch.multiple(
        ops, forward=one_at_a_time(ops.forward, lock), backward=one_at_a_time(ops.backward, lock)
    ):
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
    [
        (TOKENS, Layout(tile=64, moves="keys", sm_margin=0)),
        (60, Layout(tile=64, moves="keys", guests="always", sm_margin=0)),
    ],
    ids=("keys that move", "queries that visit"),
)
def test_ranks_are_as_exact_as_the_same_maths(queries: int, layout: Layout) -> None:
    """Errors are at most twice those of one process on the same kernels. Those of the output are no larger:
    parts are rounded once, when all are merged."""
    sizes = (HEADS, queries), (KV_HEADS, TOKENS), (KV_HEADS, TOKENS)
    qkv = [torch.randn(1, heads, tokens, D).bfloat16() for heads, tokens in sizes]
    dout = torch.randn_like(qkv[0])
    attn = fa4flex.compile(v.alibi, v.causal, sinks=torch.randn(HEADS))
    exact = alone(attn, [x.double() for x in qkv], dout.double())
    with ptxsim.device("sm_90a") as gpu:
        one = alone(attn, qkv, dout)
        before = len(gpu.results)
        found = spread(attn, qkv, dout, layout)
    assert not gpu.findings, gpu.report()
    assert sum("fwd_sm90" in x.kernel for x in gpu.results[before:]) > RANKS, "some results are in parts"
    for result, alike, true in zip(found, one, exact, strict=True):
        error, theirs = (in_parts(x.double() - true) for x in (result, alike))
        no_worse([[x] for x in error], [[x] for x in theirs])
    squares = [(x[0].double() - exact[0]).pow(2).mean() for x in (found, one)]
    assert squares[0] <= 1.2 * squares[1]  # of parts that were rounded, 1.4 to 1.7 times
