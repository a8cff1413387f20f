"""Primitives that meet after the softmax, in pairs: dropout, normalisers, statistics, skipping; on a CPU."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from helpers import agree, close
from normalizer_cases import NORMALIZERS
from output_cases import KINDS, Sizes, leaves, sizes_of
from skip_cases import Case, drawn
from torch import Tensor

import fa4flex
from fa4flex import Dropout, Precision, Schedule, reference
from fa4flex.errors import UnsupportedError
from fa4flex.variants import causal, sigmoid_attention, softpick

EVERY = ("lse", "max_scores", "max_logit", "entropy")


def fresh(p: float = 0.4) -> Dropout:
    return Dropout(p, int(torch.randint(-(1 << 63), (1 << 63) - 1, ())))


# --- dropout of the weights of any normaliser ---------------------------------------------------------------


def compare(kind: str, name: str, sizes: Sizes, **more: Any) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, sizes)
    normalizer, learned = NORMALIZERS[name](sizes, leaf)
    composition = {"mask": causal, "normalizer": normalizer, "dropout": fresh(), **more}
    made = KINDS[kind](sizes, leaf, composition)
    exact = made.oracle(made.qkv)
    agree(made.attend(*made.qkv), exact, [*made.qkv, *learned])
    with torch.no_grad():
        assert close(made.attend(*made.qkv)[0], exact[0])


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_every_normaliser(kind: str, name: str, seed: int) -> None:
    compare(kind, name, Sizes())


@pytest.mark.parametrize("name", ["softpick", "biased", "silu"])
@pytest.mark.parametrize("kv_heads", [1, 7])
def test_dropout_of_groups_tile_by_tile(kv_heads: int, name: str, seed: int) -> None:
    sizes = Sizes(heads=7, kv_heads=kv_heads, q_len=50, kv_len=70)
    compare("dense", name, sizes, schedule=Schedule(tile=(16, 16)))


@pytest.mark.parametrize("normalizer", [softpick(), sigmoid_attention(0.0)])
def test_everything_is_dropped_and_has_no_gradient(normalizer: Any, seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    out = fa4flex.attention(q, k, v, normalizer=normalizer, dropout=1.0)
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), [q, k, v]))


# --- statistics are of the weights before dropout -----------------------------------------------------------


@pytest.mark.parametrize("q_len", [2, 37])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_the_entropy_beside_dropout(with_sinks: bool, q_len: int, seed: int) -> None:
    leaf = leaves(torch.float64)
    q, k, v = leaf(2, 4, q_len, 8), leaf(2, 2, 50, 8), leaf(2, 1, 50, 6)
    gain, sinks = leaf(4), leaf(4) if with_sinks else None

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * gain[h]

    options: dict[str, Any] = {"sinks": sinks, "dropout": fresh()}
    attn = fa4flex.compile(score, causal, **options, schedule=Schedule(tile=(16, 16)))
    out, aux = attn(q, k, v, return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    truth, lse = reference.attention(q, k, v, score, causal, **options, statistics=exact)
    learned = [q, k, v, gain, *([] if sinks is None else [sinks])]
    agree((out, aux.lse, aux.entropy), (truth, lse, exact["entropy"]), learned)
    for name in ("max_scores", "max_logit"):
        assert close(getattr(aux, name), exact[name]), name
    plain = fa4flex.compile(score, causal, sinks=sinks)(q, k, v, return_aux=EVERY)[1]
    assert close(aux.entropy, plain.entropy), "dropout changes no statistic"


# --- skipping beside dropout and statistics -----------------------------------------------------------------


def of_case(case: Case, dropout: Dropout | None) -> fa4flex.Attention:
    bias, allowed = case.bias, case.allowed
    return fa4flex.compile(
        lambda s, b, h, q_idx, kv_idx: s + bias[b, h, q_idx, kv_idx],
        lambda b, h, q_idx, kv_idx: allowed[b, h, q_idx, kv_idx],
        sinks=case.sinks, dropout=dropout, schedule=Schedule(tile=case.tile),
        precision=Precision(compute="float64", skip=case.skip),
    )  # fmt: skip


def entropy_bound(skip: float, keys: int) -> float:
    """docs/primitives.md has the proof."""
    share = min(skip, 0.5)
    return skip * math.log(keys + 1) - share * math.log(share) - (1 - share) * math.log1p(-share)


def test_random_scores_keep_their_bounds(seed: int) -> None:
    draw, left = random.Random(seed), 0.0
    for number in range(20):
        case = drawn(draw)
        dropout = fresh(draw.choice((0.2, 0.7))) if number % 3 else None
        attn = of_case(case, dropout)
        out, aux = attn(case.q, case.k, case.v, return_aux=EVERY)
        exact: dict[str, Tensor] = {}
        score, mask = attn.variant.score_mod, attn.variant.mask
        more: dict[str, Any] = {"sinks": case.sinks, "dropout": dropout}
        truth, _ = reference.attention(case.q, case.k, case.v, score, mask, **more, statistics=exact)
        bound = reference.skip_bound(case.skip, case.v, case.allowed, case.sinks is not None, dropout)
        large = case.scores.masked_fill(~case.allowed, 0).abs().amax() + 1
        rounding = 1e-11 * large + (1e-5 if out.dtype == torch.float32 else 0)
        error = (out.double() - truth).abs()
        assert bool((error <= bound + rounding * (1 + truth.abs())).all()), (error - bound).max()
        off = (aux.entropy.double() - exact["entropy"]).abs()
        assert bool((off <= entropy_bound(case.skip, case.k.shape[2]) + rounding).all()), off.max()
        for name in ("max_scores", "max_logit"):
            assert close(getattr(aux, name), exact[name], 1e-9), name
        left += float(attn.skipped(case.q, case.k, case.v).sum())
    assert left > 0, "something is left out"


def test_gradients_beside_skipping_are_nearly_those_without(seed: int) -> None:
    """A share of 1e-9 changes nothing above 1e-6, though three tiles in four are left out."""
    leaf, skip = leaves(torch.float64), 1e-9
    q, k, v, slopes = leaf(1, 2, 64, 8), leaf(1, 2, 64, 8), leaf(1, 2, 64, 8), leaf(2)

    def near(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s - (5 + slopes[h] * slopes[h]) * (q_idx - kv_idx).abs()

    options: dict[str, Any] = {"dropout": fresh(), "schedule": Schedule(tile=(8, 8))}
    found = []
    for precision in (Precision(skip=skip), Precision()):
        attn = fa4flex.compile(near, causal, precision=precision, **options)
        out, aux = attn(q, k, v, return_aux=("lse", "entropy"))
        weights = [
            torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape) for x in (out, *aux[::3])
        ]
        loss = sum((x * w).sum() for x, w in zip((out, *aux[::3]), weights, strict=True))
        found.append(torch.autograd.grad(loss, [q, k, v, slopes]))
        assert (attn.skipped(q, k, v).mean() > 0.3) == bool(precision.skip)
    for mine, other in zip(*found, strict=True):
        assert close(mine, other, 1e-6)


@pytest.mark.parametrize("normalizer", [softpick, sigmoid_attention])
def test_other_weights_have_no_bound_and_are_refused(normalizer: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)skip=0\.01.*bound is of a softmax"):
        fa4flex.compile(normalizer=normalizer, precision=Precision(skip=0.01))
