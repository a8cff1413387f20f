"""Gradients through rounding: those of dense autograd, as if q, k and v were what codes stand for."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from helpers import cumulative
from torch import Tensor, nn
from torch.nn import functional

import fa4flex
from fa4flex import Precision, UnsupportedError, Varlen, quantize
from fa4flex.primitives.products import KEYS
from fa4flex.variants import causal, softcap

Tensors = dict[str, Tensor]
WIDTH, GROUP, CAP = 64, 2, 3.0
FORMATS = [(qk, pv) for qk in KEYS for pv in ("float8_e4m3", "bfloat16")]


def drawn(dtype: torch.dtype = torch.float32) -> Tensors:
    """Keys far from zero, and values of one sign: what is taken out before rounding matters."""
    shapes = {"q": (2, 2 * GROUP, 40, WIDTH), "k": (2, 2, 150, WIDTH), "v": (2, 2, 150, 32)}
    made = {name: torch.randn(*shape) for name, shape in shapes.items()}
    made["k"] += 2 * torch.randn(WIDTH)
    made["v"] = made["v"].abs()
    made = {name: x.to(dtype) for name, x in made.items()}
    return made | {"sinks": torch.randn(2 * GROUP), "table": torch.randn(2 * GROUP, 40)}


def through(numbers: Tensor, x: Tensor) -> Tensor:
    """The numbers, with gradients as if they were x."""
    return x + (numbers.to(x.dtype) - x).detach()


def dense(x: Tensors, numbers: Any, kind: str) -> tuple[Tensor, Tensor]:
    """out and lse as the formulas stand, in the dtype of `x`. Codes are of k minus its mean, whose part of
    q.k is exact."""
    q, k, v = x["q"], x["k"], x["v"]
    mean = k.mean(2, keepdim=True)
    of_q, of_k, of_v = through(numbers.q, q), through(numbers.k, k - mean), through(numbers.v, v)
    of_k, of_v, mean = (t.repeat_interleave(GROUP, 1) for t in (of_k, of_v, mean))
    scores = (of_q @ of_k.mT + (q * mean).sum(-1, keepdim=True)) / math.sqrt(WIDTH)
    if kind in ("table", "everything"):
        scores = scores * x["table"][None, :, :, None].tanh()
    if kind in ("cap", "everything"):
        scores = CAP * (scores / CAP).tanh()
    rows, keys = torch.arange(40), torch.arange(150)
    scores = scores.masked_fill(rows[:, None] + 110 < keys, -torch.inf)
    logits = scores
    if kind in ("sinks", "everything"):
        sinks = x["sinks"].view(1, -1, 1, 1).expand(2, -1, 40, 1)
        logits = torch.cat([scores, sinks], -1)
    lse = logits.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ of_v, lse


def attend(x: Tensors, kind: str, formats: tuple[str, str], at_each_call: bool) -> tuple[Tensor, Tensor]:
    """The same by the library."""
    table = x["table"]

    def times(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * table[h, q_idx].tanh()

    mods: dict[str, Any] = {
        "plain": None, "sinks": None, "cap": softcap(CAP), "table": times,
        "everything": fa4flex.as_score(times) >> softcap(CAP),
    }  # fmt: skip
    sinks = x["sinks"] if kind in ("sinks", "everything") else None
    given: dict[str, Any] = {"score_mod": mods[kind], "mask": causal, "sinks": sinks}
    qk, pv = formats
    qkv = x["q"], x["k"], x["v"]
    if at_each_call:
        precision = Precision(qk=qk, pv=pv)
        out, lse = fa4flex.attention(*qkv, return_lse=True, precision=precision, **given)
    else:
        codes = quantize(*qkv, qk=qk, pv=pv)  # type: ignore[arg-type]
        out, lse = fa4flex.attention(codes, return_lse=True, **given)
    return out, lse


def gradients(results: tuple[Tensor, Tensor], x: Tensors, of_lse: bool) -> dict[str, Tensor]:
    out, lse = results
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).sin().to(out.dtype)
    loss = (out * weights).sum() + (lse.sin().sum() if of_lse else 0)
    found = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
    return {name: g for name, g in zip(x, found, strict=True) if g is not None}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).square().mean().sqrt())


@pytest.mark.parametrize("kind", ["plain", "sinks", "cap", "table", "everything"])
@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_gradients_pass_straight_through(
    formats: tuple[str, str], kind: str, of_lse: bool, seed: int
) -> None:
    """Within twice the error of the same formula in float32."""
    given = drawn()
    with torch.no_grad():
        numbers = quantize(given["q"], given["k"], given["v"], qk=formats[0], pv=formats[1]).dequantize()  # type: ignore[arg-type]

    def leaves(dtype: torch.dtype) -> Tensors:
        return {name: t.to(dtype, copy=True).requires_grad_() for name, t in given.items()}

    exact = leaves(torch.float64)
    expected_results = dense(exact, numbers, kind)
    expected = gradients(expected_results, exact, of_lse)
    single = leaves(torch.float32)
    alike = gradients(dense(single, numbers, kind), single, of_lse)
    x = leaves(torch.float32)
    found_results = attend(x, kind, formats, random.random() < 0.5)
    found = gradients(found_results, x, of_lse)
    for mine, theirs in zip(found_results, expected_results, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=2e-5)
    assert set(found) == set(expected) >= {"q", "k", "v"}
    for name, theirs in expected.items():
        least = 1e-6 * float(theirs.square().mean().sqrt())
        assert error(found[name], theirs) <= 2 * error(alike[name], theirs) + least, name


def test_gradients_of_half_precision(seed: int) -> None:
    """float32 sums over what bfloat16 tensors were rounded to, rounded once."""
    given = drawn(torch.bfloat16)
    with torch.no_grad():
        numbers = quantize(given["q"], given["k"], given["v"]).dequantize()
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    expected = gradients(dense(exact, numbers, "everything"), exact, True)
    x = {name: t.clone().requires_grad_() for name, t in given.items()}
    found = gradients(attend(x, "everything", ("int8", "float8_e4m3"), True), x, True)
    for name, theirs in expected.items():
        assert found[name].dtype == given[name].dtype
        rounded = error(theirs.to(given[name].dtype), theirs)
        # The weights of the loss are those of a bfloat16 output: as coarse as what is compared.
        assert error(found[name], theirs) <= 2 * rounded + 2**-9 * float(theirs.square().mean().sqrt()), name


def test_packed_sequences_have_means_of_their_own(seed: int) -> None:
    """Gradients of packed tokens are those of each sequence alone; those of padding are zero."""
    lengths, precision = [50, 0, 70, 30], Precision(qk="int8", pv="float8_e4m3")
    tokens = sum(lengths)
    q, k, v = torch.randn(tokens, 4, 32), torch.randn(tokens, 2, 32) + 3, torch.randn(tokens, 2, 32)
    sinks = torch.randn(4)
    x = [t.requires_grad_() for t in (q, k, v)]
    used = torch.tensor([50, 0, 41, 30], dtype=torch.int32)
    varlen = Varlen(cumulative(lengths), seqused_q=used, seqused_k=used)
    poison = [t.detach().clone() for t in x]
    for t in poison:
        t[91:120] = math.nan
        t.requires_grad_()
    attn = fa4flex.compile(softcap(CAP), causal, sinks=sinks, precision=precision)
    out, lse = attn(*poison, varlen=varlen, return_lse=True)
    stood_for = quantize(*poison, varlen=varlen).dequantize()
    assert stood_for.k[91:120].isfinite().all() and stood_for.v[91:120].isfinite().all()
    seen = torch.cat([torch.arange(91), torch.arange(120, 150)])
    loss = out[seen].sin().sum() + lse[:, seen].sin().sum()
    found = torch.autograd.grad(loss, poison)
    for a, b in ((0, 50), (50, 91), (120, 150)):
        own = [t[a:b].detach().transpose(0, 1)[None].requires_grad_() for t in x]
        alone, of_rows = attn(*own, return_lse=True)
        torch.testing.assert_close(alone[0].transpose(0, 1), out[a:b], atol=1e-5, rtol=1e-5)
        wanted = torch.autograd.grad(alone.sin().sum() + of_rows.sin().sum(), own)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine[a:b], theirs[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
    for mine in found:
        assert (mine[91:120] == 0).all()


def test_numbers_of_codes_have_the_gradients_of_what_was_rounded(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 20, 32, requires_grad=True) for _ in range(3))
    codes = quantize(q, k, v)
    exact = codes.dequantize()
    weights = torch.randn(1, 2, 20, 32)
    assert torch.equal(torch.autograd.grad((exact.q * weights).sum(), q)[0], weights)
    assert torch.equal(torch.autograd.grad((exact.v * weights).sum(), v)[0], weights)
    of_k = torch.autograd.grad((exact.k * weights).sum(), k)[0]
    torch.testing.assert_close(of_k, weights - weights.mean(2, keepdim=True))
    with torch.no_grad():
        plain = codes.dequantize()
        assert not any(x.requires_grad for x in plain[:3])
    for mine, theirs in zip(exact, plain, strict=True):
        assert torch.equal(mine, theirs)  # type: ignore[arg-type]
    assert quantize(q.detach(), k.detach(), v.detach()).given is None


def test_second_derivatives(seed: int) -> None:
    """They are those of the rule itself: rounding adds nothing."""
    given = {name: x[:1, :, :8] for name, x in drawn().items() if name in "qkv"}
    given["q"] = given["q"][:, :2]

    def twice(attend: Any, dtype: torch.dtype) -> Any:
        x = [t.to(dtype, copy=True).requires_grad_() for t in given.values()]
        first = torch.autograd.grad(attend(*x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.cos().sum() for g in first), x)

    with torch.no_grad():
        numbers = quantize(*given.values(), pv="bfloat16").dequantize()

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mean = k.mean(2, keepdim=True)
        scores = through(numbers.q, q) @ through(numbers.k, k - mean).mT + (q * mean).sum(-1, keepdim=True)
        return (CAP * (scores / math.sqrt(WIDTH) / CAP).tanh()).softmax(-1) @ v

    attn = fa4flex.compile(softcap(CAP), precision=Precision(qk="int8"))
    for mine, theirs in zip(twice(attn, torch.float32), twice(exact, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-3)


def test_derivatives_that_are_no_backward_pass_are_refused(seed: int) -> None:
    attn = fa4flex.compile(precision=Precision(qk="int8"))
    q, k, v = (torch.randn(1, 2, 16, 32) for _ in range(3))
    for transform in (
        lambda: torch.func.grad(lambda x: attn(x, k, v).sum())(q),
        lambda: torch.func.jvp(lambda x: attn(x, k, v), (q,), (q,)),
        lambda: torch.func.vmap(lambda x: attn(x, k, v))(q[None]),
        lambda: torch.func.jvp(lambda x: quantize(x, k, v).dequantize().q, (q,), (q,)),
    ):
        with pytest.raises(UnsupportedError, match="derivative of rounding"):
            transform()


@pytest.mark.parametrize("backward", ["float8_e4m3", torch.float8_e5m2, "int8"])
def test_products_of_8_bits_in_the_backward_pass_are_refused(backward: Any) -> None:
    with pytest.raises(UnsupportedError, match="5 to 7 %"):
        Precision(qk="int8", pv="float8_e4m3", backward=backward)


# --- training -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A layer of attention that learns to copy: each character is one that stood `lag` places before."""

    def __init__(self, attn: fa4flex.Attention) -> None:
        super().__init__()
        self.attn = attn
        self.embedding, self.places = nn.Embedding(16, 64), nn.Embedding(64, 64)
        self.qkv, self.out, self.head = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.places.weight[: text.shape[1]]
        q, k, v = self.qkv(x).bfloat16().unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return self.head(x + self.out(self.attn(q, k, v).float().transpose(1, 2).flatten(2)))


def losses(precision: Precision, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = Model(fa4flex.compile(mask=causal, precision=precision))
    optimiser, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        text = torch.randint(0, 16, (8, 64))
        given = model(text)[:, 5::8]
        loss = functional.cross_entropy(given.flatten(0, 1), text[:, :-5:8].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.slow
def test_training_reaches_the_same_loss(seed: int) -> None:
    """The first steps of benchmarks/train_character_model.py --kinds, whose 1,000 take minutes."""
    exact, rounded = (losses(p, 45, seed) for p in (Precision(), Precision(qk="int8", pv="float8_e4m3")))
    assert exact[-1] < exact[0] - 0.7  # it learns
    assert abs(sum(rounded) - sum(exact)) < 0.01 * sum(exact)
