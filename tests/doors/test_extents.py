"""Extents of captured tensors that a mod reads: right at every length, by every door."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.codegen.build import bind
from fa4flex.primitives.score import as_score
from fa4flex.variant import Variant

LENGTHS = (30, 50, 64, 34)

Make = Callable[[Tensor, Tensor], Callable[..., Any]]
"""(q [B, H, N, D], table [N]) -> a score mod that adds a multiple of the distance."""

READS: dict[str, tuple[Make, Callable[[int], float]]] = {
    "shape": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / t.shape[0], lambda n: 1 / n),
    "len": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / len(t), lambda n: 1 / n),
    "size": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / t.size(0), lambda n: 1 / n),
    "size from the end": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / q.size(dim=-2), lambda n: 1 / n),
    "size of all": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / q.size()[2], lambda n: 1 / n),
    "numel": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / q.numel(), lambda n: 1 / (16 * n)),
    "torch.numel": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / torch.numel(t), lambda n: 1 / n),
    "nbytes": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / t.nbytes, lambda n: 1 / (4 * n)),
    "half": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / (t.shape[-1] // 2), lambda n: 1 / (n // 2)),
    "unpacked": (
        lambda q, t: lambda s, b, h, i, j: s + (i - j) / (lambda B, H, N, D: N + D)(*q.shape),
        lambda n: 1 / (n + 8),
    ),
    "of a row": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / q[b, h].shape[0], lambda n: 1 / n),
    "of a derived tensor": (
        lambda q, t: lambda s, b, h, i, j: s + (i - j) / (t * 2).shape[0],
        lambda n: 1 / n,
    ),
    "range": (
        lambda q, t: lambda s, b, h, i, j: s + (i - j) / sum(1 for _ in range(t.shape[0] // 8)),
        lambda n: 1 / (n // 8),
    ),
    "if": (
        lambda q, t: lambda s, b, h, i, j: s + (i - j) / (40 if t.shape[0] > 40 else 20),
        lambda n: 1 / (40 if n > 40 else 20),
    ),
    "float": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / math.sqrt(len(t)), lambda n: n**-0.5),
    "an index": (lambda q, t: lambda s, b, h, i, j: s + (i - j) / (t[t.shape[0] - 1] + 40), lambda n: 1 / 40),
    "a slice": (
        lambda q, t: lambda s, b, h, i, j: s + (i - j) / (40 + 0 * t[: t.shape[0] // 2][0]),
        lambda n: 1 / 40,
    ),
    "a tensor": (
        lambda q, t: lambda s, b, h, i, j: s + (i - j) / torch.tensor(t.shape[0]),
        lambda n: 1 / n,
    ),
    "minimum": (
        lambda q, t: lambda s, b, h, i, j: s + torch.clamp(i - j, max=t.shape[0] // 2) / min(40, len(t)),
        lambda n: math.nan,
    ),
}  # fmt: skip
SELECTED = ("shape", "len", "numel", "half", "range", "of a row", "of a derived tensor", "if", "an index")


def inputs(n: int) -> tuple[Tensor, ...]:
    table = torch.randn(n)
    table[-1] = 0
    return (*[torch.randn(1, 2, n, 8) for _ in range(3)], table)


def expected(given: tuple[Tensor, ...], name: str) -> Tensor:
    q, k, v = (x.double() for x in given[:3])
    n = q.shape[2]
    i = torch.arange(n)
    bias = (i[:, None] - i) * READS[name][1](n)
    if name == "minimum":
        bias = (i[:, None] - i).clamp(max=n // 2) / min(40, n)
    return (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v


def attend(name: str) -> Callable[..., Tensor]:
    make = READS[name][0]
    return lambda q, k, v, t: fa4flex.flex_attention(q, k, v, score_mod=make(q, t))


@pytest.mark.parametrize("name", READS)
def test_eager(name: str) -> None:
    for n in LENGTHS:
        given = inputs(n)
        torch.testing.assert_close(attend(name)(*given).double(), expected(given, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()  # all of these are one function to it
    compiled = torch.compile(attend(name), backend="eager", fullgraph=True, dynamic=dynamic)
    for n in LENGTHS:
        given = inputs(n)
        torch.testing.assert_close(compiled(*given).double(), expected(given, name), atol=1e-5, rtol=1e-5)


class Model(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.attend = attend(name)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return self.attend(q, k, v, t)


@pytest.mark.parametrize("name", ["shape", "len", "numel", "half", "of a row"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_exported(name: str, strict: bool, before: bool) -> None:
    """Also after an eager call, whose trace is kept."""
    if before:
        attend(name)(*inputs(30))
    d = torch.export.Dim("n", min=8, max=512)
    shapes = {x: {2: d} for x in "qkv"} | {"t": {0: d}}
    exported = torch.export.export(Model(name), inputs(32), dynamic_shapes=shapes, strict=strict).module()
    for n in LENGTHS:
        given = inputs(n)
        torch.testing.assert_close(exported(*given).double(), expected(given, name), atol=1e-5, rtol=1e-5)


def test_numbers_computed_from_extents_outside_the_mod_stay_symbolic_in_an_export() -> None:
    class Outside(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
            n, half = t.shape[0], t.shape[0] / 2
            return fa4flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * half / n / n)

    d = torch.export.Dim("n", min=8, max=512)
    shapes = {x: {2: d} for x in "qkv"} | {"t": {0: d}}
    exported = torch.export.export(Outside(), inputs(32), dynamic_shapes=shapes, strict=False).module()
    for n in LENGTHS:
        given = inputs(n)
        q, k, v = (x.double() for x in given[:3])
        i = torch.arange(n)
        exact = (q @ k.mT / 8**0.5 + (i[:, None] - i) / (2 * n)).softmax(-1) @ v
        torch.testing.assert_close(exported(*given).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["shape", "len", "numel", "half", "of a row", "an index"])
def test_one_program_serves_all_lengths(name: str) -> None:
    make, programs = READS[name][0], set()
    for n in LENGTHS:
        q, _, _, table = inputs(n)
        programs.add(bind(Variant(score_mod=as_score(make(q, table)))).trace.facts.key)
    assert len(programs) == 1
