"""Dropout in kernels on simulated GPUs: the pairs of the oracle, at most twice as far from it as PyTorch at
that dtype, both passes. No call is computed in PyTorch operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from output_cases import KINDS, Made, Sizes, leaves, sizes_of
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Dropout, reference
from fa4flex.runtime import blockwise
from fa4flex.variants import alibi, causal

CHIPS = ("sm_90a", "sm_100a")


@pytest.fixture(autouse=True)
def _by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("computed in PyTorch operations")

    for name in ("forward_on_gpu", "backward_on_gpu"):
        monkeypatch.setattr(blockwise, name, refuse)


def in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any, **given: Any
) -> tuple[Tensor, Tensor]:
    """The same maths in the dtype of q, each product and the weights rounded."""
    assert score_mod is None
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~reference.allowed_pairs(mask, tuple(scores.shape)), -torch.inf)  # type: ignore[arg-type]
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isfinite().unsqueeze(-1), (scores - lse.unsqueeze(-1)).exp(), 0).to(q.dtype)
    dropout = given["dropout"]
    kept = reference.kept_pairs(dropout, tuple(scores.shape), given["first"])  # type: ignore[arg-type]
    return (weights * (kept / (1 - dropout.rate)).to(q.dtype)) @ v, lse


def near(found: Tensor, plain: Tensor, true: Tensor) -> None:
    mine, theirs = ((x.double() - true.double()).abs() for x in (found, plain))
    assert not found.isnan().any()
    floor = 1e-6 * true.abs().max().double()
    assert mine.max() <= 2 * theirs.max() + floor, f"{mine.max()} where PyTorch has {theirs.max()}"


def compare(chip: str, made: Made) -> None:
    """Both passes."""
    weight = None
    with ptxsim.device(chip, sms=2) as gpu:
        out, lse = made.attend(*made.qkv)
        weight = torch.randn(out.shape)
        found = torch.autograd.grad((out * weight.to(out.dtype)).sum(), made.qkv)
    assert not gpu.findings, gpu.report()
    exact, plain = made.oracle(made.qkv), made.oracle(made.qkv, in_pytorch)
    near(out, plain[0], exact[0])
    torch.testing.assert_close(lse.double(), exact[1].double(), atol=1e-4, rtol=1e-4)
    others = (torch.autograd.grad((x[0] * weight.to(x[0].dtype)).sum(), made.qkv) for x in (plain, exact))
    for mine, theirs, true in zip(found, *others, strict=True):
        near(mine, theirs, true)


def case(kind: str, sizes: Sizes, **more: Any) -> Made:
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, ())
    return KINDS[kind](sizes_of(kind, sizes), leaves(torch.bfloat16), {"dropout": Dropout(0.3, seed), **more})


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1)])
@pytest.mark.parametrize("chip", CHIPS)
def test_heads_that_share_keys(chip: str, heads: tuple[int, int], seed: int) -> None:
    compare(chip, case("dense", Sizes(1, *heads, 70, 150, 64, 64), mask=causal))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 128), (96, 96), (64, 40)])
@pytest.mark.parametrize("chip", CHIPS)
def test_widths(chip: str, dims: tuple[int, int], seed: int) -> None:
    compare(chip, case("dense", Sizes(1, 2, 1, 140, 150, *dims)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("chip", CHIPS)
def test_ragged_batches(chip: str, kind: str, seed: int) -> None:
    compare(chip, case(kind, Sizes(dim=64, dim_v=64), mask=causal))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_few_queries(chip: str, seed: int) -> None:
    compare(chip, case("few", Sizes(1, 4, 2, 2, 200, 64, 64)))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_pairs_are_the_oracles(chip: str, seed: int) -> None:
    """Values that are rows of an identity matrix show each weight: zero are those that are dropped."""
    q, k = (torch.randn(1, 2, n, 64).bfloat16() for n in (150, 64))
    dropout, eye = Dropout(0.4, torch.randint(1 << 60, ())), torch.eye(64).bfloat16().expand(1, 2, 64, 64)
    with torch.no_grad(), ptxsim.device(chip, sms=2):
        found = fa4flex.compile(dropout=dropout)(q, k, eye)
    assert torch.equal(found > 0, reference.kept_pairs(dropout, (1, 2, 150, 64)))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "q_len"), [(4, 2), (8, 5), (8, 16)])
def test_pairs_of_rows_of_several_heads(heads: int, q_len: int, seed: int) -> None:
    """Rows 8 apart of a tile are not of queries 8 apart there, and share no hash."""
    q, k = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((heads, q_len), (1, 64)))
    dropout, eye = Dropout(0.4, torch.randint(1 << 60, ())), torch.eye(64).bfloat16()[None, None]
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2):
        found = fa4flex.compile(dropout=dropout)(q, k, eye)
    assert torch.equal(found > 0, reference.kept_pairs(dropout, (1, heads, q_len, 64)))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_slopes_sinks_and_learned_slopes(chip: str, seed: int) -> None:
    leaf = leaves(torch.bfloat16)
    slopes, sinks = torch.rand(2).requires_grad_(), torch.randn(2).requires_grad_()
    dropout = Dropout(0.3, torch.randint(1 << 60, ()))
    mod = fa4flex.as_score(alibi(slopes)) >> (lambda s, b, h, q, k: 5 * torch.tanh(s / 5))
    q, k, v = leaf(1, 2, 70, 64), leaf(1, 1, 90, 64), leaf(1, 1, 90, 64)
    with ptxsim.device(chip, sms=2) as gpu:
        out = fa4flex.compile(mod, causal, sinks=sinks_of(sinks), dropout=dropout)(q, k, v)
        weight = torch.randn(out.shape)
        found = torch.autograd.grad((out * weight.to(out.dtype)).sum(), (q, k, v, slopes, sinks))
    assert not gpu.findings, gpu.report()
    exact, _ = reference.attention(q, k, v, mod, causal, sinks=sinks, dropout=dropout)
    true = torch.autograd.grad((exact * weight).sum(), (q, k, v, slopes, sinks))
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    for mine, wanted in zip(found, true, strict=True):
        assert (mine.double() - wanted.double()).abs().max() <= 6e-2 * wanted.double().abs().max()


def sinks_of(x: Tensor) -> Any:
    return lambda: x


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_launches_read_new_seeds_and_rates(chip: str, seed: int) -> None:
    """Neither compiles anything: the kernel reads the one, and is handed the other."""
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (70, 90, 90))
    value = torch.zeros((), dtype=torch.int64)
    attn, everything = fa4flex.compile(dropout=Dropout(0.5, value)), fa4flex.compile(dropout=1.0)
    with torch.no_grad(), ptxsim.device(chip, sms=2):
        for number in (3, -5):
            value.fill_(number)
            exact, _ = reference.attention(q, k, v, dropout=Dropout(0.5, number))
            torch.testing.assert_close(attn(q, k, v).double(), exact, atol=2e-2, rtol=2e-2)
        other = Dropout(0.125, value)
        exact, _ = reference.attention(q, k, v, dropout=other)
        torch.testing.assert_close(attn(q, k, v, dropout=other).double(), exact, atol=2e-2, rtol=2e-2)
        assert not everything(q, k, v).any()
