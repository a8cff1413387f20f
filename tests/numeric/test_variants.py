"""Every variant end to end: results and gradients against the oracle, and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import agree, called, cumulative, leaf
from torch import Tensor
from variant_table import TABLE, Case, Draw, Sizes

import fa4flex
from fa4flex import Varlen, reference
from fa4flex.primitives.mask import as_mask

DRAWS = [
    pytest.param(draw, id=f"{name} {number}")
    for name, draws in TABLE.items()
    for number, draw in enumerate(draws)
]
LONG_KEYS, LONG_QUERIES = Sizes(), Sizes(q_len=31, kv_len=19)
TINY = Sizes(1, 2, 1, 4, 6, 2, 2)
HIDDEN = 2  # the query that `hide` leaves without keys


def oracle_takes(composition: dict[str, Any]) -> dict[str, Any]:
    """The composition for the oracle, which knows sinks as their logits only."""
    sinks = composition.get("sinks")
    return composition if sinks is None else {**composition, "sinks": sinks.logits}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("sizes", [LONG_KEYS, LONG_QUERIES], ids=["long keys", "long queries"])
def test_agrees_with_the_oracle(draw: Draw, sizes: Sizes) -> None:
    case = draw(sizes)
    qkv, composition = case.sizes.qkv(), case.compose(*case.learned)
    found = called(fa4flex.compile(**composition), *qkv)
    agree(found, reference.attention(*qkv, **oracle_takes(composition)), [*qkv, *case.learned])


@pytest.mark.parametrize("draw", DRAWS)
def test_gradients_are_finite_differences(draw: Draw) -> None:
    """Through out and lse, to q, k, v and every learned tensor: independent of the oracle."""
    case = draw(TINY)

    def attention(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = called(fa4flex.compile(**case.compose(*learned)), q, k, v)
        return out, torch.where(lse.isfinite(), lse, 0)

    inputs = (*case.sizes.qkv(), *case.learned)
    large = sum(x.numel() for x in inputs) > 60
    assert torch.autograd.gradcheck(attention, inputs, fast_mode=large)


def hide(case: Case) -> dict[str, Any]:
    """The case's composition, with nothing allowed for query HIDDEN."""
    composition = case.compose(*case.learned)
    seeing = as_mask(lambda b, h, q_idx, kv_idx: q_idx != HIDDEN)
    return {**composition, "mask": composition["mask"] & seeing if "mask" in composition else seeing}


def _of_nothing(composition: dict[str, Any]) -> float:
    """Log-sum-exp of a row without keys, as `called` has it."""
    normalizer = composition.get("normalizer")
    if normalizer is None:
        return -math.inf
    return math.log(normalizer.plus) if normalizer.kind == "softmax" else 0.0


def check_a_row_without_keys(case: Case, **options: Any) -> None:
    """Zeros, -inf (or the sink), and zero gradients whatever comes from above to that row."""
    qkv, composition = case.sizes.qkv(), hide(case)
    out, lse = called(fa4flex.compile(**composition, **options), *qkv)
    has_sinks = "sinks" in composition
    empty = torch.full_like(lse[:, :, HIDDEN], _of_nothing(composition))
    if has_sinks:
        empty = case.learned[0].expand(2, -1)
    assert out[:, :, HIDDEN].eq(0).all() and torch.equal(lse[:, :, HIDDEN], empty)
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    dout[:, :, HIDDEN], dlse[:, :, HIDDEN] = 3, 5
    found = torch.autograd.grad([out, lse], [*qkv, *case.learned], [dout, dlse])
    assert all(g.eq(0).all() for g in found[: 3 if has_sinks else None])
    if has_sinks:
        assert found[3].eq(2 * 5).all(), "the lse of such a row is the sink, in both batch entries"


@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_without_keys_is_zero(draw: Draw) -> None:
    check_a_row_without_keys(draw(replace(LONG_KEYS, batch=2)))


@pytest.mark.parametrize("draw", DRAWS)
def test_empty_sequences(draw: Draw) -> None:
    """Three packed sequences: the second has no queries, the third has queries and no keys."""
    case = draw(LONG_KEYS)
    s, composition = case.sizes, case.compose(*case.learned)
    cu_q, cu_k = cumulative([s.q_len, 0, 2]), cumulative([s.kv_len, 3, 0])
    q = leaf(s.q_len + 2, s.heads, s.dim)
    k, v = leaf(s.kv_len + 3, s.kv_heads, s.dim), leaf(s.kv_len + 3, s.kv_heads, s.dim_v)
    attn, varlen = fa4flex.compile(**composition), Varlen(cu_q, cu_k)
    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k)
    truth = reference.varlen((q, k, v), ranges, **oracle_takes(composition))
    agree(called(attn, q, k, v, varlen=varlen), truth, [q, k, v, *case.learned])
    out, lse = called(attn, q, k, v, varlen=varlen)
    assert out[s.q_len :].eq(0).all()
    assert "sinks" in composition or lse[:, s.q_len :].eq(_of_nothing(composition)).all()
    dq, dk, dv = torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
    assert dq[s.q_len :].eq(0).all() and dk[s.kv_len :].eq(0).all() and dv[s.kv_len :].eq(0).all()
