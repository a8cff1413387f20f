"""Functions of captured tensors that are read as functions of their elements, and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_trace_habits import traced_with, value_of
from torch import Tensor
from torch.nn import functional as F

import fa4flex

N = 12
FLOATS, OTHERS = torch.randn(N), torch.randn(N)
TABLE, LONGS, SMALL = torch.randn(2, N), torch.arange(N) * 7 - 20, torch.arange(N, dtype=torch.int32)
SCALE, HALVES = torch.tensor(0.7), torch.randn(N).bfloat16()

COMMUTING: dict[str, Callable[[], Tensor]] = {
    "function": lambda: F.softplus(FLOATS),
    "chain": lambda: (FLOATS * 3).tanh().exp() - 1,
    "reversed operators": lambda: 1 - 2 / FLOATS,
    "two tensors": lambda: torch.maximum(FLOATS, OTHERS) * OTHERS,
    "a scale": lambda: SCALE.exp() * FLOATS,
    "keywords": lambda: torch.clamp(FLOATS, min=-0.5, max=0.5),
    "choice": lambda: torch.where(FLOATS > OTHERS, FLOATS, 0.0),
    "comparison": lambda: (LONGS > 3) & (LONGS != 15),
    "whole quotient": lambda: LONGS // 4,
    "remainder": lambda: LONGS % 5,
    "of integers": lambda: LONGS / 3,
    "cast": lambda: LONGS.float().sin(),
    "rounding cast": lambda: (FLOATS * 3).bfloat16().float(),
    "16 bits": lambda: HALVES.float().exp(),
    "columns": lambda: TABLE.T.square().T,
    "new dimension": lambda: FLOATS[None, :].sin().transpose(0, 1)[:, None].permute(1, 2, 0),
    "of a sum": lambda: FLOATS.cumsum(0).sin() * FLOATS,
    "constant": lambda: FLOATS * torch.arange(N),
}
RECOMPUTED: dict[str, Callable[[], Tensor]] = {
    "sum": lambda: FLOATS.cumsum(0),
    "product": lambda: TABLE.T @ torch.ones(2),
    "softmax": lambda: FLOATS.softmax(-1),
    "wrapping product": lambda: LONGS * (2**62 + 1),
    "wrapping int32": lambda: SMALL * 1_000_000_007,
    "narrow cast": lambda: (LONGS * 2**30).to(torch.int32),
    "float64": lambda: FLOATS.double().exp(),
    "slice": lambda: torch.cat([FLOATS, OTHERS])[3 : N + 3],
    "turned round": lambda: FLOATS.flip(0),
    "repeated": lambda: FLOATS[:1].expand(N),
    "integer power": lambda: LONGS**2,
}


def read(table: Callable[[], Tensor]) -> tuple[str, Tensor, bool]:
    """The expression of a score that adds a tensor's elements, its value at each key, and whether a tensor is
    computed again."""
    ranks = table().ndim

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        made = table()
        first = [0] * (ranks - 1)
        element = made[(*first, kv)] if made.shape[-1] == N else made[(kv, *first)]
        return torch.where(element, 1.0, -1.0) if made.dtype is torch.bool else element + 0.0 * s

    traced, captures = traced_with(mod, "score")
    found = value_of(traced.root, captures, {"score": torch.zeros(N), "kv": torch.arange(N)})
    return str(traced.root), found, any(x.recipe is not None for x in captures.operands)


def exact(table: Tensor) -> Tensor:
    line = table.reshape(-1, N)[0] if table.shape[-1] == N else table.reshape(N, -1)[:, 0]
    return torch.where(line, 1.0, -1.0) if table.dtype is torch.bool else line.float()


@pytest.mark.parametrize("name", COMMUTING)
def test_elements_are_computed_where_they_are_read(name: str) -> None:
    _, found, again = read(COMMUTING[name])
    assert again is (name == "of a sum"), "a sum is no function of one element"
    torch.testing.assert_close(found.float(), exact(COMMUTING[name]()), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_others_are_left_to_torch(name: str) -> None:
    _, found, again = read(RECOMPUTED[name])
    assert again
    torch.testing.assert_close(found.float(), exact(RECOMPUTED[name]()), rtol=2e-6, atol=2e-6)


def test_captured_numbers_stay_numbers() -> None:
    """Another value needs neither another trace nor another program."""
    by = 0.5

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + (FLOATS * by)[kv]

    traced, captures = traced_with(mod, "score")
    assert captures.scalars == (0.5,) and not traced.pinned
    attn = fa4flex.compile(mod)
    given = [torch.randn(1, 1, N, 16) for _ in range(3)]
    attn(*given)
    trace, by = attn.trace, 2.0
    scores = given[0].double() @ given[1].double().mT / 4 + 2 * FLOATS.double()
    torch.testing.assert_close(
        attn(*given).double(), scores.softmax(-1) @ given[2].double(), rtol=0, atol=1e-5
    )
    assert attn.trace.facts is trace.facts


def test_numbers_of_what_is_computed_again_are_constants() -> None:
    by = 0.5
    traced, captures = traced_with(lambda s, b, h, q, kv: s + (FLOATS * by).cumsum(0)[kv], "score")
    assert not captures.scalars and [x.value for x in traced.pinned] == [0.5]


def test_vectors_of_them_are_read_from_memory() -> None:
    """A loop over elements would compute each again and again."""
    traced, captures = traced_with(lambda s, b, h, q, kv: s + TABLE.exp()[h].sum(), "score")
    assert "exp" not in str(traced.root) and captures.operands[0].recipe is not None
    edges = torch.arange(N).float()
    mask = lambda b, h, q, kv: torch.searchsorted(edges * 2, kv.float()) > 3  # noqa: E731
    assert traced_with(mask, "mask")[1].operands[0].recipe is not None


def test_no_gradient_flows_where_none_is_wanted() -> None:
    table = torch.randn(N, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        with torch.no_grad():
            fixed = table.exp()
        return s + fixed[kv] + table.exp()[kv] + table.exp().detach()[kv] + table.data.sin()[kv]

    given = [torch.randn(1, 1, N, 16, dtype=torch.float64) for _ in range(3)]
    weight = torch.randn(1, 1, N, 16)
    (found,) = torch.autograd.grad((fa4flex.compile(mod)(*given) * weight).sum(), table)
    wide = table.detach().double().requires_grad_()
    bias = 2 * wide.detach().exp() + wide.exp() + wide.detach().sin()
    out = (given[0] @ given[1].mT / 4 + bias).softmax(-1) @ given[2]
    (wanted,) = torch.autograd.grad((out * weight).sum(), wide)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
