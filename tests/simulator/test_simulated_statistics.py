"""Statistics that kernels return beside the output, on simulated GPUs: right against the definition in
float64, in memory that is poisoned before; and computed blockwise where no kernel has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import drawn_timing
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Paging, Schedule, Varlen, reference
from fa4flex.reference import sequence_ranges, unpage
from fa4flex.variants import causal

EVERY = ("lse", "max_logit", "entropy")
BOTH = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
POISON = 1e30
"""Number that memory holds before results are written to it."""


def halved(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Scores below 0 in some heads, and far from their products."""
    return score * 0.5 - 3 * h


def banded(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Some rows see no key."""
    return (q_idx >= kv_idx - 5) & (q_idx % 7 != 3)


@contextlib.contextmanager
def simulated(arch: str, *names: str) -> Iterator[None]:
    """Within, calls run on a simulated GPU under a random timing, by kernels with these names alone."""
    timing, seed = drawn_timing()
    empty = torch.Tensor.new_empty

    def poisoned(x: Tensor, *size: Any, **options: Any) -> Tensor:
        made = empty(x, *size, **options)
        return made.fill_(POISON) if made.is_floating_point() and not made.is_meta else made

    with (
        patch.object(torch.Tensor, "new_empty", poisoned),
        ptxsim.device(arch, seed, timing, sms=2) as gpu,
    ):
        yield
    kernels = [result.kernel for result in gpu.results]
    assert not any(result.findings or result.remarks for result in gpu.results)
    for name in names:
        assert any(name in kernel for kernel in kernels), kernels


def compare(aux: fa4flex.Aux, exact: dict[str, Tensor], lse: Tensor, names: tuple[str, ...] = EVERY) -> None:
    """Scores are float32 products of 16-bit numbers: errors are those of their sums and of exponentials."""
    for name in names:
        mine, truth = getattr(aux, name), lse if name == "lse" else exact[name]
        torch.testing.assert_close(mine.double(), truth, atol=2e-4, rtol=1e-4, msg=name)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).mul_(1.5).to(dtype)


# --- many queries -------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[str, ...]]] = {
    "plain": ({}, (2, 2), EVERY),
    "causal, sinks": ({"mask": causal}, (4, 1), EVERY),
    "score and band": ({"score_mod": halved, "mask": banded}, (7, 1), EVERY),
    "threshold 0": ({"score_mod": halved}, (2, 2), ("lse", "max_scores", *EVERY[1:])),
}
"""Composition, heads of queries and of keys, statistics."""


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", CASES)
def test_dense(arch: str, case: str, seed: int) -> None:
    torch.manual_seed(seed)
    composition, (heads, kv_heads), names = CASES[case]
    q, (k, v) = drawn(1, heads, 140, 64), (drawn(1, kv_heads, 200, 64) for _ in range(2))
    sinks = torch.randn(heads) if "sinks" in case else None
    attn = fa4flex.compile(**composition, sinks=sinks)
    with torch.no_grad(), simulated(arch, "fwd_"):
        _, aux = attn(q, k, v, return_aux=names)
    exact: dict[str, Tensor] = {}
    mods = composition.get("score_mod"), composition.get("mask")
    _, lse = reference.attention(q, k, v, *mods, sinks=sinks, statistics=exact)
    compare(aux, exact, lse, names)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("q_len", [130, 2])
@pytest.mark.parametrize(
    "names",
    [*((name,) for name in (*EVERY, "max_scores")), ("lse", "max_scores"), ("max_scores", "entropy")],
    ids="+".join,
)
def test_some_alone(arch: str, q_len: int, names: tuple[str, ...], seed: int) -> None:
    """A kernel is compiled for those that are asked for, with nothing beside them. Those for few queries have
    no largest scores."""
    torch.manual_seed(seed)
    q, k, v = (drawn(1, 2, n, 64) for n in (q_len, 130, 130))
    kind = "fwd_" if q_len > 64 or "max_scores" in names else "decode_"
    with torch.no_grad(), simulated(arch, kind):
        _, aux = fa4flex.attention(q, k, v, return_aux=names)
    exact: dict[str, Tensor] = {}
    _, lse = reference.attention(q, k, v, statistics=exact)
    compare(aux, exact, lse, names)


@pytest.mark.slow
@BOTH
def test_packed(arch: str, seed: int) -> None:
    """Sequences with tokens that none uses, which are large: no statistic may see them."""
    torch.manual_seed(seed)
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 150, 150], [0, 20, 40, 140]))
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([7, 140, 0], [20, 15, 90]))
    q, k, v = drawn(150, 4, 64), drawn(140, 2, 64), drawn(140, 2, 64)
    ranges = sequence_ranges(starts_q, used_q), sequence_ranges(starts_k, used_k)
    for x, rows in ((q, ranges[0]), (k, ranges[1]), (v, ranges[1])):
        unused = torch.ones(x.shape[0], dtype=torch.bool)
        for first, last in rows:
            unused[first:last] = False
        x[unused] = 100
    attn = fa4flex.compile(halved, banded)
    with torch.no_grad(), simulated(arch, "fwd_"):
        _, aux = attn(q, k, v, varlen=Varlen(starts_q, starts_k, used_q, used_k), return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    _, lse = reference.varlen((q, k, v), ranges, halved, banded, statistics=exact)
    compare(aux, exact, lse)


@pytest.mark.slow
@BOTH
def test_padded(arch: str, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = drawn(3, 4, 140, 64), drawn(3, 4, 150, 64), drawn(3, 4, 150, 64)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([140, 3, 0], [1, 133, 9]))
    for x, used in ((q, used_q), (k, used_k), (v, used_k)):
        for b, n in enumerate(used.tolist()):
            x[b, :, n:] = 100
    varlen = Varlen(seqused_q=used_q, seqused_k=used_k)
    with torch.no_grad(), simulated(arch, "fwd_"):
        _, aux = fa4flex.attention(q, k, v, mask=causal, varlen=varlen, return_aux=EVERY)
    of_heads = torch.full((4,), -torch.inf, dtype=torch.float64)
    for b, (n, m) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        one: dict[str, Tensor] = {}
        mine = (x[b : b + 1, :, :end] for x, end in zip((q, k, v), (n, m, m), strict=True))
        _, lse = reference.attention(*mine, None, causal, statistics=one)
        of_heads = torch.maximum(of_heads, one["max_logit"])
        part = fa4flex.Aux(aux.lse[b : b + 1, :, :n], None, None, aux.entropy[b : b + 1, :, :n])
        compare(part, one, lse, ("lse", "entropy"))
        assert (aux.entropy[b, :, n:] == 0).all()
    torch.testing.assert_close(aux.max_logit.double(), of_heads, atol=2e-4, rtol=1e-4)


# --- few queries --------------------------------------------------------------------------------------------


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("share", [None, 2], ids=["alone", "split"])
def test_few_queries(arch: str, heads: tuple[int, int], share: int | None, seed: int) -> None:
    """Keys of a row that one block has, and that several share: the last of these may see none of them."""
    torch.manual_seed(seed)
    q, (k, v) = drawn(1, heads[0], 3, 64), (drawn(1, heads[1], 600, 64) for _ in range(2))
    sinks = torch.randn(heads[0]) if heads == (4, 1) else None
    mask = causal if share else None
    attn = fa4flex.compile(halved, mask, sinks=sinks, schedule=Schedule(split=share))
    with torch.no_grad(), simulated(arch, "decode_", *(("combine",) if share else ())):
        _, aux = attn(q, k, v, return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    _, lse = reference.attention(q, k, v, halved, mask, sinks=sinks, statistics=exact)
    compare(aux, exact, lse)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("kind", ["decode_", "fwd_", "8 bits"])
def test_pages(arch: str, kind: str, seed: int) -> None:
    """Few queries, chunks of many, and caches of 8 bits, whose own kernels have none of these statistics."""
    torch.manual_seed(seed)
    pools = [torch.randn(12, 16, 2, 64).bfloat16() for _ in range(2)]
    table, used = torch.randperm(12).int().view(3, 4), torch.tensor([61, 1, 33], dtype=torch.int32)
    if kind == "8 bits":
        pools = [x.to(torch.float8_e4m3fn) for x in pools]
    sizes = (80, 3, 0) if kind == "fwd_" else (2, 2, 2)
    starts = torch.tensor([0, *sizes]).cumsum(0).int()
    q, paging = drawn(int(starts[-1]), 8, 64), Paging(table, used)
    attn = fa4flex.compile(mask=banded, layout="bshd")
    names = () if kind == "8 bits" else (kind,)
    with torch.no_grad(), simulated(arch, *names):
        if kind == "fwd_":
            _, aux = attn(q, *pools, varlen=Varlen(starts), paging=paging, return_aux=EVERY)
        else:
            _, aux = attn(q.view(3, 2, 8, 64), *pools, paging=paging, return_aux=EVERY)
    rows, ranges = unpage(pools[0].float(), table, used)
    values = unpage(pools[1].float(), table, used)[0]
    exact: dict[str, Tensor] = {}
    _, lse = reference.varlen(
        (q, rows, values), (sequence_ranges(starts), ranges), None, banded, statistics=exact
    )
    if kind != "fwd_":
        lse = lse.unflatten(1, (3, 2)).transpose(0, 1)
        exact["entropy"] = exact["entropy"].unflatten(1, (3, 2)).transpose(0, 1)
    compare(aux, exact, lse)


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_gradients_through_the_entropy(arch: str, with_sinks: bool, seed: int) -> None:
    """Beside those of the output and of the log-sum-exp; errors are at most twice those of the same maths in
    PyTorch operations on 16-bit tensors."""
    torch.manual_seed(seed)
    q, (k, v) = drawn(1, 4, 140, 64).mul_(0.7), (drawn(1, 2, 150, 64).mul_(0.7) for _ in range(2))
    gain, sinks = torch.rand(4), torch.randn(4) if with_sinks else None

    def mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score * gain[h]

    leaves = [x.requires_grad_() for x in (q, k, v, gain, *([] if sinks is None else [sinks]))]
    weights = [torch.randn(1, 4, 140, 64), torch.randn(1, 4, 140), torch.randn(1, 4, 140)]

    def gradients(out: Tensor, lse: Tensor, entropy: Tensor) -> list[Tensor]:
        finite = torch.where(torch.isfinite(lse), lse, 0)
        loss = sum((x * w).sum() for x, w in zip((out, finite, entropy), weights, strict=True))
        return list(torch.autograd.grad(loss, leaves))

    with simulated(arch, "fwd_"):
        attn = fa4flex.compile(mod, banded, sinks=sinks)
        out, aux = attn(q, k, v, return_aux=EVERY)
        found = gradients(out, aux.lse, aux.entropy)
    exact: dict[str, Tensor] = {}
    truth, lse = reference.attention(q, k, v, mod, banded, sinks=sinks, statistics=exact)
    wanted = gradients(truth, lse, exact["entropy"])
    rounded = _in_torch(q, k, v, gain, sinks, gradients)
    for mine, true, other in zip(found, wanted, rounded, strict=True):
        error, allowed = ((x.double() - true.double()).norm() for x in (mine, other))
        assert error <= 2 * allowed + 1e-3 * true.double().norm(), (error, allowed, true.double().norm())


def _in_torch(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, sinks: Any, gradients: Any) -> list[Tensor]:
    """Gradients by autograd, with probabilities and outputs rounded as kernels round them."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT).float() / 8 * gain.view(1, -1, 1, 1)
    rows, columns = torch.arange(q.shape[2]).view(-1, 1), torch.arange(k.shape[2])
    allowed = banded(0, 0, rows, columns)
    logits = scores.masked_fill(~allowed, -torch.inf)
    sink = torch.full((4,), -1e30) if sinks is None else sinks
    logits = torch.cat([logits, sink.view(1, 4, 1, 1).expand(1, 4, q.shape[2], 1)], -1)
    lse = logits.logsumexp(-1)
    p = (logits - lse.unsqueeze(-1)).exp()
    logs = torch.where(p > 0, (logits - lse.unsqueeze(-1)).masked_fill(p == 0, 0), 0)
    empty = ~allowed.any(-1) if sinks is None else torch.zeros(q.shape[2], dtype=torch.bool)
    entropy = -(p * logs).sum(-1).masked_fill(empty, 0)
    p = p.masked_fill(empty[:, None], 0)
    out = p[..., :-1].bfloat16() @ v
    made: list[Tensor] = gradients(out, lse.masked_fill(empty, -torch.inf), entropy)
    return made
