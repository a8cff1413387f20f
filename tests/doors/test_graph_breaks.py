"""Mods that Dynamo cannot trace: torch.compile gives what eager mode does, fullgraph=True says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.errors import Fa4flexError

Q, K, V = torch.randn(3, 1, 2, 12, 8)
T = torch.linspace(-1, 1, 12)
SEEN: list[int] = []
COUNT = 0

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def printing(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    print(end="")
    return s + j


def trying(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    try:
        return s + T[j].nothing
    except AttributeError:
        return s * 2 + j * 0.1


def counting_globally(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    global COUNT
    COUNT += 1
    return s + 0.1 * j


def counting() -> Callable[..., Any]:
    n = 0

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        nonlocal n
        n += 1
        return s * 0.3

    return mod


def noting(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    SEEN.append(1)
    return s + j


def asserting(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    assert i >= 0
    return s + j


def nothing(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    s + j


class Scaled:
    calls = 0

    def __init__(self, counts: bool) -> None:
        self.counts, self.scale = counts, 0.5

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if self.counts:
            self.calls += 1
        return s * self.scale + j * 0.1


SCORES: dict[str, Callable[..., Any]] = {
    "print": printing,
    "boolean index": lambda s, b, h, i, j: s * T[T > 0].sum(),
    "slice": lambda s, b, h, i, j: s + Q[b, h, j, 2:5].sum(),
    "constant float": lambda s, b, h, i, j: -0.0,
    "constant int": lambda s, b, h, i, j: 3,
    "infinity in a branch": lambda s, b, h, i, j: float("-inf") if T.ndim > 1 else 2.5,
    "if": lambda s, b, h, i, j: s if i > j else s * 2,
    "list by head": lambda s, b, h, i, j: s * [1.0, 2.0][h],
    "generator": lambda s, b, h, i, j: s + sum(x * 0.5 for x in (i, j)),
    "try": trying,
    "global": counting_globally,
    "nonlocal": counting(),
    "appends": noting,
    "callable": Scaled(counts=False),
    "callable that counts": Scaled(counts=True),
    "lambda in a dict": {"f": lambda s, b, h, i, j: s * 0.7 - j}["f"],
    "assert": asserting,
    "f-string": lambda s, b, h, i, j: (f"{i}", s + 0.1 * j)[1],
    "hash": lambda s, b, h, i, j: s * (hash(i) * 0 + 1) + j,
    "repr": lambda s, b, h, i, j: s * (len(repr(i)) * 0 + 1) + j,
    "eval": lambda s, b, h, i, j: eval("s * 2 + j"),
    "item": lambda s, b, h, i, j: s * T[3].item() + j,
    "int()": lambda s, b, h, i, j: s * int(i),
    "range": lambda s, b, h, i, j: s * len(range(h)),
    "raises": lambda s, b, h, i, j: (_ for _ in ()).throw(ValueError("mine")),
    "no such attribute": lambda s, b, h, i, j: s.unknown,
    "nonzero": lambda s, b, h, i, j: s + T.nonzero().sum() * 0.01 * j,
    "random": lambda s, b, h, i, j: s + torch.rand(()),
    "in place": lambda s, b, h, i, j: s.mul_(2),
    "changes a captured tensor": lambda s, b, h, i, j: s + T.add_(0)[j],
    "returns nothing": nothing,
    "returns a tuple": lambda s, b, h, i, j: (s, j),
    "returns words": lambda s, b, h, i, j: "s",
}

MASKS: dict[str, Callable[..., Any]] = {
    "true": lambda b, h, i, j: True,
    "int": lambda b, h, i, j: 1,
    "float": lambda b, h, i, j: 1.0,
    "tuple": lambda b, h, i, j: (i >= j, j),
    "print": lambda b, h, i, j: (print(end=""), i >= j)[1],
    "boolean index": lambda b, h, i, j: (T[T > 0].sum() > 0) & (i >= j),
    "and": lambda b, h, i, j: i >= j and h > 0,
}


def outcome(function: Callable[..., Tensor]) -> Tensor | Exception:
    try:
        return function(Q, K, V)
    except Exception as error:
        return error


def check(call: Callable[..., Tensor]) -> None:
    expected = outcome(call)
    assert isinstance(expected, (Tensor, Fa4flexError))
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="eager", fullgraph=fullgraph)
        for _ in range(1 if fullgraph else 2):
            found = outcome(compiled)
            if fullgraph and isinstance(found, Exception):
                assert isinstance(found, torch._dynamo.exc.Unsupported)
                assert "attention of fa4flex that is not captured" in str(found)
                assert "cannot be traced:\n    " in str(found) and "Without fullgraph=True" in str(found)
                assert "test_graph_breaks.py" in str(found)
            elif isinstance(expected, Tensor):
                torch.testing.assert_close(found, expected)
            else:
                assert type(found) is type(expected) and str(found) == str(expected)


@pytest.mark.parametrize("name", SCORES)
def test_score_mods_give_what_eager_mode_gives(name: str) -> None:
    check(lambda q, k, v: fa4flex.flex_attention(q, k, v, score_mod=SCORES[name]) * 2)


@pytest.mark.parametrize("name", MASKS)
def test_masks_give_what_eager_mode_gives(name: str) -> None:
    check(lambda q, k, v: fa4flex.attention(q, k, v, mask=MASKS[name]) * 2)


def packed(q: Tensor, k: Tensor, v: Tensor, mod: Callable[..., Any]) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    varlen = fa4flex.Varlen(torch.tensor([0, 5, 12], dtype=torch.int32))
    return fa4flex.attention(q, k, v, score_mod=mod, varlen=varlen, return_lse=True)


def other_layout(q: Tensor, k: Tensor, v: Tensor, mod: Callable[..., Any]) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options: dict[str, Any] = {"sinks": T[:2], "scale": 0.3, "layout": "bshd", "return_lse": True}
    return fa4flex.attention(q, k, v, score_mod=mod, **options)


def paged(q: Tensor, k: Tensor, v: Tensor, mod: Callable[..., Any]) -> tuple[Tensor, ...]:
    pools = [x.transpose(1, 2).reshape(3, 4, 2, 8) for x in (k, v)]
    paging = fa4flex.Paging(torch.tensor([[2, 0, 1]]).int(), torch.tensor([10]).int())
    return fa4flex.attention(q, *pools, score_mod=mod, paging=paging, return_lse=True)


def largest(q: Tensor, k: Tensor, v: Tensor, mod: Callable[..., Any]) -> tuple[Tensor, ...]:
    wanted = torch.nn.attention.flex_attention.AuxRequest(lse=True, max_scores=True)
    out, aux = fa4flex.flex_attention(q, k, v, score_mod=mod, return_aux=wanted)
    return out, aux.lse, aux.max_scores


@pytest.mark.parametrize("call", [packed, other_layout, paged, largest], ids=lambda f: f.__name__)
def test_every_kind_of_call_may_be_left_out_of_graphs(call: Callable[..., tuple[Tensor, ...]]) -> None:
    results = []
    for run in (call, torch.compile(call, backend="eager")):
        given = [x.clone().requires_grad_() for x in (Q, K, V)]
        found = run(*given, printing)
        gradients = torch.autograd.grad(found[0].sin().sum(), given)
        results.append([x.detach() for x in (*found, *gradients)])
    torch.testing.assert_close(results[1], results[0])
