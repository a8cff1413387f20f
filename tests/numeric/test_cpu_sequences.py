"""Ragged batches on the CPU against the oracle's loop over sequences."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_cases import CASES, Case, Sizes, uniform
from helpers import close, cumulative
from test_cpu_backward import by_autograd, floating, listed
from torch import Tensor

from fa4flex import reference
from fa4flex.codegen.evaluate import Captured
from fa4flex.errors import InputError
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.cpu import Inputs, Sequences, backward_sequences, forward_sequences

F64 = torch.float64
LONGEST = Sizes(batch=6, heads=4, kv_heads=2, q_len=200, kv_len=300)
Q_LENGTHS, K_LENGTHS = [3, 0, 200, 129, 1, 5], [7, 4, 128, 300, 0, 1]
NAMES = (
    "dense",
    "bottom-right",
    "document",
    "window per head",
    "prefix per batch",
    "soft cap",
    "bias by query",
    "dot of tables",
)


def packed(*lengths: Tensor) -> Sequences:
    return Sequences.of(Varlen(*lengths), torch.empty(0), torch.empty(0))


def run_both(
    case: Case, qkv: list[Tensor], sequences: Sequences, upstream: tuple[Tensor, Tensor], sinks: Tensor | None
) -> None:
    """Forward and backward of a packed batch against the oracle; tables fit the longest sequence."""
    tables = case.tables(LONGEST)
    inputs = Inputs(*qkv, Captured(tuple(tables)), 0.25, sinks)
    got = forward_sequences(case.facts, inputs, sequences)
    leaves = [x.clone().requires_grad_() for x in qkv]
    mine = [t.clone().requires_grad_(t.is_floating_point()) for t in tables]
    extra = [] if sinks is None else [sinks.clone().requires_grad_()]
    ranges = list(sequences.queries), list(sequences.keys)
    results = reference.varlen(
        (leaves[0], leaves[1], leaves[2]),
        ranges,
        *case.mods(mine),
        scale=0.25,
        sinks=extra[0] if extra else None,
    )
    assert close(got.out, results[0].detach()) and close(got.lse, results[1].detach())
    grads = backward_sequences(case.facts, inputs, sequences, got, (*upstream, None), floating(tables))
    want = by_autograd(list(results), [*leaves, *(mine[i] for i in floating(tables)), *extra], list(upstream))
    for g, w in zip(listed(grads), want, strict=True):
        assert close(g, w)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_packed(name: str, sinks: bool) -> None:
    q_rows, k_rows = sum(Q_LENGTHS), sum(K_LENGTHS)
    qkv = [torch.randn(rows, heads, 16, dtype=F64) for rows, heads in ((q_rows, 4), (k_rows, 2), (k_rows, 2))]
    upstream = torch.randn(q_rows, 4, 16, dtype=F64), torch.randn(4, q_rows, dtype=F64)
    sequences = packed(cumulative(Q_LENGTHS), cumulative(K_LENGTHS))
    run_both(CASES[name], qkv, sequences, upstream, uniform(4) if sinks else None)


def test_packed_with_used_lengths() -> None:
    """Rows past the used length: out 0, lse -inf, no gradient; keys past it, here NaN, are never read."""
    q_rows, k_rows = sum(Q_LENGTHS), sum(K_LENGTHS)
    qkv = [torch.randn(rows, heads, 16, dtype=F64) for rows, heads in ((q_rows, 4), (k_rows, 2), (k_rows, 2))]
    used_q, used_k = torch.tensor([2, 0, 130, 129, 0, 5]), torch.tensor([7, 0, 100, 0, 0, 1])
    sequences = packed(cumulative(Q_LENGTHS), cumulative(K_LENGTHS), used_q, used_k)
    unused_q, unused_k = torch.ones(q_rows, dtype=torch.bool), torch.ones(k_rows, dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(sequences.queries, sequences.keys):
        unused_q[q0:q1], unused_k[k0:k1] = False, False
    qkv[0][unused_q], qkv[1][unused_k], qkv[2][unused_k] = math.nan, math.nan, math.nan
    upstream = torch.randn(q_rows, 4, 16, dtype=F64), torch.randn(4, q_rows, dtype=F64)
    run_both(CASES["bottom-right"], qkv, sequences, upstream, None)
    got = forward_sequences(CASES["causal"].facts, Inputs(*qkv), sequences)
    assert (got.out[unused_q] == 0).all() and (got.lse[:, unused_q] == -math.inf).all()


@pytest.mark.parametrize("name", ["dense", "bottom-right", "prefix per batch", "bias by query"])
def test_padded(name: str) -> None:
    """A padded batch is the packed batch of its used rows."""
    case = CASES[name]
    used_q, used_k = torch.tensor(Q_LENGTHS), torch.tensor(K_LENGTHS)
    q, k, v = LONGEST.qkv(F64)
    tables = case.tables(LONGEST)
    real_q = torch.arange(200) < used_q.view(-1, 1)
    real_k = torch.arange(300) < used_k.view(-1, 1)
    k.transpose(1, 2)[~real_k] = math.nan
    v.transpose(1, 2)[~real_k] = math.nan
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=F64)

    def rows(x: Tensor, real: Tensor) -> Tensor:
        return x.transpose(1, 2)[real]

    inputs = Inputs(q, k, v, Captured(tuple(tables)), 0.25)
    flat = Inputs(rows(q, real_q), rows(k, real_k), rows(v, real_k), Captured(tuple(tables)), 0.25)
    padded = Varlen(seqused_q=used_q, seqused_k=used_k)
    dense, ragged = Sequences.of(padded, q, k), packed(cumulative(Q_LENGTHS), cumulative(K_LENGTHS))
    one, two = forward_sequences(case.facts, inputs, dense), forward_sequences(case.facts, flat, ragged)
    assert torch.equal(rows(one.out, real_q), two.out) and (rows(one.out, ~real_q) == 0).all()
    assert torch.equal(rows(one.lse, real_q).T, two.lse) and (rows(one.lse, ~real_q) == -math.inf).all()
    given = rows(dout, real_q), rows(dlse, real_q).T
    grads = backward_sequences(case.facts, inputs, dense, one, (dout, dlse, None), floating(tables))
    flat_grads = backward_sequences(case.facts, flat, ragged, two, (*given, None), floating(tables))
    for g, w, real in zip(listed(grads)[:3], listed(flat_grads)[:3], (real_q, real_k, real_k)):
        assert close(rows(g, real), w) and (rows(g, ~real) == 0).all()
    for g, w in zip(listed(grads)[3:], listed(flat_grads)[3:]):
        assert close(g, w)


def test_lengths_that_do_not_fit() -> None:
    good, x = cumulative([3, 4]), torch.zeros(6, 2, 4)
    with pytest.raises(InputError, match="which has 6 rows"):
        forward_sequences(CASES["dense"].facts, Inputs(x, x, x), packed(good, good))
    with pytest.raises(InputError, match="up to 4 for a length of 3"):
        Sequences.of(Varlen(seqused_k=torch.tensor([4, 0])), torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
