"""Tensors that mods compute from captured ones: they follow every change, counted by torch or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from uncounted import WRITES

import fa4flex

B, H, N, D = 1, 2, 40, 16
Formula = Callable[..., Tensor]
"""Formula of a tensor [N] or [H, N] from captured tensors, for them and for float64."""

MADE: dict[str, tuple[Formula, tuple[tuple[int, ...], ...]]] = {
    "softplus": (F.softplus, ((N,),)),
    "tanh": (lambda p: (p * 3).tanh(), ((N,),)),
    "two tables": (lambda a, b: (a / 2).exp() - 2 * b, ((N,), (N,))),
    "broadcast": (lambda a, b: a[:, None] * b.sigmoid(), ((H,), (N,))),
    "0-d": (lambda a, b: a.exp() * b, ((), (N,))),
    "transposed": (lambda t: t.T.square(), ((N, H),)),
    "where": (lambda a, b: torch.where(a > 0, a, -b), ((N,), (N,))),
    "sum": (lambda w: w.cumsum(0), ((N,),)),
    "product": (lambda a, b: a @ b, ((H, 3), (3, N))),
    "softmax": (lambda w: w.softmax(-1).log(), ((N,),)),
    "function of a sum": (lambda w: (w.cumsum(0) / 9).sin() * w, ((N,),)),
    "part": (lambda t: t[3:] * 2, ((N + 3,),)),
}


def composed(formula: Formula, captured: list[Tensor], backend: str) -> fa4flex.Attention:
    ranks = len(formula(*captured).shape)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        table = formula(*captured)
        return s + (table[kv] if ranks == 1 else table[h, kv])

    return fa4flex.compile(score, backend=backend)


def expected(formula: Formula, captured: list[Tensor], qkv: list[Tensor]) -> Tensor:
    q, k, v = (x.double() for x in qkv)
    bias = formula(*captured)
    bias = bias[None, None, None] if bias.ndim == 1 else bias[None, :, None]
    return ((q @ k.mT) / D**0.5 + bias).softmax(-1) @ v


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("name", MADE)
def test_they_follow_every_change(name: str, backend: str, write: str) -> None:
    formula, shapes = MADE[name]
    captured = [drawn(shape) for shape in shapes]
    attn = composed(formula, captured, backend)
    for _ in range(3):
        qkv = [torch.randn(B, H, N, D) for _ in range(3)]
        for _ in range(2):
            out, _ = attn(*qkv, return_lse=True)
            exact = expected(formula, [x.double() for x in captured], qkv)
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
        for x in captured:
            WRITES[write](x, drawn(tuple(x.shape)))


@pytest.mark.parametrize("write", ["data", "behind the count", "memory used again"])
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("name", MADE)
def test_gradients_reach_what_they_are_made_of(name: str, backend: str, write: str) -> None:
    formula, shapes = MADE[name]
    captured = [drawn(shape).requires_grad_() for shape in shapes]
    attn = composed(formula, captured, backend)
    for _ in range(2):
        qkv = [torch.randn(B, H, N, D, dtype=torch.float64) for _ in range(3)]
        weight = torch.randn(B, H, N, D)
        with torch.no_grad():
            attn(*qkv, return_lse=True)  # what a call without gradients leaves serves none with them
        out, _ = attn(*qkv, return_lse=True)
        found = torch.autograd.grad((out * weight).sum(), captured)
        exact = [x.detach().double().requires_grad_() for x in captured]
        wanted = torch.autograd.grad((expected(formula, exact, qkv) * weight).sum(), exact)
        largest = max(float(x.abs().max()) for x in wanted)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6 * (1 + largest))
        for x in captured:
            WRITES[write](x, drawn(tuple(x.shape)))


@pytest.mark.parametrize("write", [name for name in WRITES if name != "average"])
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("made", ["documents", "sums", "comparison"])
def test_masks_of_them_follow_every_change(made: str, backend: str, write: str) -> None:
    starts = torch.rand(N)

    def table() -> Tensor:
        if made == "documents":
            return (starts * 4).floor()
        return (starts > 0.8).cumsum(0) if made == "sums" else starts > 0.5

    attn = fa4flex.compile(mask=lambda b, h, q, kv: table()[q] == table()[kv], backend=backend)
    q, k, v = (torch.randn(B, H, N, D) for _ in range(3))
    for _ in range(3):
        out, _ = attn(q, k, v, return_lse=True)
        allowed = table()[:, None] == table()
        scores = (q.double() @ k.double().mT / D**0.5).masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=1e-5)
        WRITES[write](starts, torch.rand(N))


def test_new_lengths_need_no_new_graph() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, scale: Tensor) -> Tensor:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + (F.softplus(slope) * scale.exp())[j]

        return fa4flex.attention(q, k, v, score_mod=score)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for length in (40, 50, 60, 70):
        qkv, slope, scale = (
            [torch.randn(B, H, length, D) for _ in range(3)],
            torch.randn(length),
            torch.randn(()),
        )
        exact = expected(lambda a, b: F.softplus(a) * b.exp(), [slope.double(), scale.double()], qkv)
        torch.testing.assert_close(compiled(*qkv, slope, scale).double(), exact, rtol=0, atol=1e-5)
    assert counter.frame_count <= 2
