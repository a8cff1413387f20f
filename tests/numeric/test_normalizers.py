"""Normalisers on a CPU: results and gradients by every kind of call are the oracle's, and stay finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import agree, close
from normalizer_cases import ELEMENTWISE, NORMALIZERS, wild
from output_cases import KINDS, Sizes, dense, in_pytorch, leaves, sizes_of
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.primitives.normalizer import Normalizer
from fa4flex.variants import causal, gated, relu_squared, sigmoid_attention, silu_attention, softpick


def compare(kind: str, name: str, sizes: Sizes, *, more: Any = (), **options: Any) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, sizes)
    normalizer, learned = NORMALIZERS[name](sizes, leaf)
    made = KINDS[kind](sizes, leaf, {"mask": causal, "normalizer": normalizer, **dict(more)}, **options)
    exact = made.oracle(made.qkv)
    agree(made.attend(*made.qkv), exact, [*made.qkv, *learned])
    with torch.no_grad():
        assert close(made.attend(*made.qkv)[0], exact[0])


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind(kind: str, name: str, seed: int) -> None:
    compare(kind, name, Sizes())


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("kv_heads", [1, 7])
def test_groups(kv_heads: int, name: str, seed: int) -> None:
    compare("dense", name, Sizes(heads=7, kv_heads=kv_heads))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_queries_before_heads(name: str, seed: int) -> None:
    compare("dense", name, Sizes(), layout="bshd")


@pytest.mark.parametrize("name", NORMALIZERS)
def test_several_tiles_and_a_score_mod(name: str, seed: int) -> None:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 2 * s - 0.1 * h

    schedule = fa4flex.Schedule(tile=(16, 16))
    compare("dense", name, Sizes(q_len=70, kv_len=90), more={"score_mod": score, "schedule": schedule})


@pytest.mark.parametrize("name", NORMALIZERS)
def test_before_an_output_function(name: str, seed: int) -> None:
    gate = torch.randn(4, dtype=torch.float64)
    compare("dense", name, Sizes(), more={"output_mod": gated(gate)})


@pytest.mark.parametrize("name", NORMALIZERS)
def test_block_maps(name: str, seed: int) -> None:
    blocks = fa4flex.BlockMap.from_dense(
        torch.tensor([[2, 0, 1], [1, 2, 0], [0, 0, 0]], dtype=torch.uint8), 16
    )
    leaf, sizes = leaves(torch.float64), Sizes(q_len=48, kv_len=48)
    normalizer, learned = NORMALIZERS[name](sizes, leaf)
    q, k, v = dense(sizes, leaf, {}).qkv
    attn = fa4flex.compile(mask=causal, blocks=blocks, normalizer=normalizer)
    exact = reference.attention(q, k, v, None, attn.variant.allowed, normalizer=normalizer)
    agree([attn(q, k, v)], exact[:1], [q, k, v, *learned])


def test_hidden_pairs_are_not_asked_about(seed: int) -> None:
    leaf, sizes = leaves(torch.float64), Sizes(q_len=40, kv_len=40)
    normalizer, _ = wild(sizes, leaf)
    made = dense(sizes, leaf, {"mask": causal, "normalizer": normalizer})
    agree(made.attend(*made.qkv), made.oracle(made.qkv), made.qkv)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_query_without_keys_gives_zero(name: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float64), Sizes(heads=2, kv_heads=2)
    normalizer, _ = NORMALIZERS[name](sizes, leaf)

    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx > 2) & (kv_idx >= 0)

    for q_len in (2, 9):
        q, k, v = leaf(1, 2, q_len, 8), leaf(1, 2, 9, 8), leaf(1, 2, 9, 8)
        out = fa4flex.compile(mask=late, normalizer=normalizer)(q, k, v)
        assert not out[:, :, :3].any()
        for gradient in torch.autograd.grad(out[:, :, :3].sum(), (q, k, v)):
            assert not gradient.any()


@pytest.mark.parametrize("q_len", [2, 9])
def test_softmax_plus_has_a_log_sum_exp_that_includes_it(q_len: int, seed: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (q_len, 9, 9))
    scores = q @ k.mT / math.sqrt(8)
    out, lse = fa4flex.compile(normalizer=Normalizer.softmax(3.0))(q, k, v, return_lse=True)
    assert close(lse, (scores.exp().sum(-1) + 3).log())
    assert close(out, scores.exp() @ v / (scores.exp().sum(-1, keepdim=True) + 3))


def test_softmax_plus_beside_sinks(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    normalizer = Normalizer.softmax(3.0)
    found = fa4flex.compile(normalizer=normalizer)(q, k, v, sinks=sinks, return_lse=True)
    agree(found, reference.attention(q, k, v, sinks=sinks, normalizer=normalizer), (q, k, v, sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", (*ELEMENTWISE, "softpick"))
def test_error_at_half_precision(name: str, dtype: torch.dtype, seed: int) -> None:
    """At most twice that of the same maths by PyTorch, each step rounded."""
    leaf, sizes = leaves(dtype), Sizes(q_len=64, kv_len=64)
    normalizer, _ = NORMALIZERS[name](sizes, leaf)
    made = dense(sizes, leaf, {"normalizer": normalizer})
    own, plain, exact = (
        made.attend(*made.qkv)[0],
        made.oracle(made.qkv, in_pytorch)[0],
        made.oracle(made.qkv)[0],
    )
    weight = torch.randn(own.shape).to(dtype)
    every = [[x, *torch.autograd.grad((x * weight.to(x.dtype)).sum(), made.qkv)] for x in (own, plain, exact)]
    for mine, other, true in zip(*every, strict=True):
        assert (mine.double() - true.double()).abs().max() <= 2 * (other.double() - true.double()).abs().max()


# --- the whole float range ----------------------------------------------------------------------------------


EXTREME = (0.0, 1e-30, -1e-30, 1e-8, 1.0, -1.0, 80.0, -80.0, 1e4, -1e4, 1e30, -1e30)


def at_scores(normalizer: Any, scores: list[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights of a row of these scores, as the output of unit values, and gradients of the scores."""
    given = torch.tensor(scores, dtype=dtype, requires_grad=True)
    n = len(scores)
    q, k = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, n, 8, dtype=dtype)
    v = torch.eye(n, dtype=dtype).view(1, 1, n, n)
    attn = fa4flex.compile(lambda s, b, h, q_idx, kv_idx: given[kv_idx], normalizer=normalizer)
    out = attn(q.requires_grad_(), k, v)[0, 0, 0]
    (slopes,) = torch.autograd.grad(out, given, torch.linspace(-1, 2, n, dtype=dtype))
    return out.detach(), slopes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["softmax_plus", "softpick", "sigmoid", "silu", "relu_squared"])
def test_scores_over_the_whole_range(name: str, dtype: torch.dtype, seed: int) -> None:
    normalizer, _ = NORMALIZERS[name](Sizes(), leaves(dtype))
    for scores in ([*EXTREME], [-1e30, -1e4, -80.0], [0.0, 0.0], [1e30, 1e30, 0.0], [1e-8, 0.0], [-1e30]):
        out, slopes = at_scores(normalizer, scores, dtype)
        assert out.isfinite().all() and slopes.isfinite().all(), (scores, out, slopes)


def test_softpick_of_extreme_scores() -> None:
    """Exactly 0 at and below 0, the share of the largest above, and digits where all scores are small."""
    pick = softpick()
    out, _ = at_scores(pick, [1e30, 1e30, 1e4, 0.0, -1e30], torch.float32)
    assert torch.equal(out, torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]))
    out, _ = at_scores(pick, [-1.0, -1e30, -1e-8, 0.0], torch.float32)
    assert not out.any()
    small = [3e-5, -1e-5, 2e-9]
    out, _ = at_scores(pick, small, torch.float32)
    total = sum(abs(math.expm1(x)) for x in small) + 1e-6
    torch.testing.assert_close(
        out.double(), torch.tensor([max(math.expm1(x), 0) / total for x in small]).double(), rtol=1e-6, atol=0
    )


def test_elementwise_weights_of_extreme_scores() -> None:
    out, _ = at_scores(sigmoid_attention(0.0), [1e30, -1e30, 0.0], torch.float32)
    assert torch.equal(out, torch.tensor([1.0, 0.0, 0.5]))
    out, _ = at_scores(silu_attention(2.0), [1e30, -1e30, 0.0], torch.float32)
    assert torch.equal(out, torch.tensor([1e30 / 2, 0.0, 0.0]))
    out, _ = at_scores(relu_squared(2.0), [1e30, -1e30, 3.0], torch.float32)
    assert torch.equal(out, torch.tensor([2.0**79, 0.0, 4.5]))


def test_softpick_does_not_depend_on_the_order_of_tiles(seed: int) -> None:
    """A score of any size in any tile."""
    scores = torch.tensor([1e4, 3.0, -2.0, 90.0, 1e4, 5e3, 0.1, -1e4] * 8, dtype=torch.float64)
    scores = scores[torch.randperm(64)]
    q, k = torch.zeros(1, 1, 8, 8, dtype=torch.float64), torch.zeros(1, 1, 64, 8, dtype=torch.float64)
    v = torch.randn(1, 1, 64, 8, dtype=torch.float64)

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return scores[kv_idx] / (q_idx * q_idx * q_idx + 1)

    schedule = fa4flex.Schedule(tile=(8, 16))
    out = fa4flex.compile(mod, normalizer=softpick(), schedule=schedule)(q, k, v)
    assert close(out, reference.attention(q, k, v, mod, normalizer=softpick())[0])
