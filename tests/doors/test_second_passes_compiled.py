"""Probabilities and their sums per key in graphs: torch.compile, torch.export, and where operators are
intercepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close, cumulative, leaf
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fa4flex
from fa4flex import Varlen
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.variants import causal


def biased(table: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, kv_idx] * (q_idx % 3)


def of_mass(q: Tensor, k: Tensor, lse: Tensor, table: Tensor) -> Tensor:
    return fa4flex.key_mass(q, k, lse, score_mod=biased(table), mask=causal)


def of_rows(q: Tensor, k: Tensor, lse: Tensor, table: Tensor) -> Tensor:
    rows = slice(-3, None)
    return fa4flex.probabilities(q, k, lse, rows, score_mod=biased(table), mask=causal, reduce="kv_heads")


FUNCTIONS = {"mass": of_mass, "rows": of_rows}


def tensors(batch: int = 2, q_len: int = 7, kv_len: int = 11) -> tuple[Tensor, ...]:
    return (
        leaf(batch, 4, q_len, 8), leaf(batch, 2, kv_len, 8),
        torch.full((batch, 4, q_len), 2.0, dtype=torch.float64, requires_grad=True), leaf(4, 40),
    )  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_with_gradients(name: str, seed: int) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        given = tensors()
        found, truth = compiled(*given), function(*given)
        assert close(found, truth)
        upstream = torch.randn_like(truth)
        got, want = (torch.autograd.grad(x, given, upstream) for x in (found, truth))
        assert all(map(close, got, want))


@pytest.mark.slow
def test_compiled_by_inductor_in_a_model(seed: int) -> None:
    """Attention, the mass of its keys, and the keys kept by it; lengths that change."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = fa4flex.compile(mask=causal)
        out, lse = attn(q, k, v, return_lse=True)
        kept = attn.key_mass(q, k, lse, reduce="heads").topk(4, -1).indices
        rows: Tensor = attn.probabilities(q, k, lse, torch.arange(2))
        return out.sum() + rows.square().sum() + kept.sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for q_len in (16, 24, 30):
        qkv = leaf(1, 4, q_len, 8), leaf(1, 2, 32, 8), leaf(1, 2, 32, 8)
        found, truth = compiled(*qkv), model(*qkv)
        assert close(found, truth)
        assert all(map(close, torch.autograd.grad(found, qkv), torch.autograd.grad(truth, qkv)))


def test_compiled_of_packed_sequences(seed: int) -> None:
    q, k, lse = leaf(10, 4, 8), leaf(12, 2, 8), torch.full((4, 10), 2.0, dtype=torch.float64)
    cu_q, cu_k = cumulative([3, 7]), cumulative([8, 4])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q: Tensor, k: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
        attn, varlen = fa4flex.compile(mask=causal), Varlen(cu_q, cu_k)
        rows = torch.tensor([1, 9])
        mass: Tensor = attn.key_mass(q, k, lse, varlen=varlen)
        return mass, attn.probabilities(q, k, lse, rows, varlen=varlen)

    attn, varlen = fa4flex.compile(mask=causal), Varlen(cu_q, cu_k)
    mass, rows = function(q, k, lse, cu_q, cu_k)
    assert close(mass, attn.key_mass(q, k, lse, varlen=varlen))
    assert close(rows, attn.probabilities(q, k, lse, torch.tensor([1, 9]), varlen=varlen))


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 40, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return of_mass(q, k, lse, self.table), of_rows(q, k, lse, self.table)


def test_exported(seed: int) -> None:
    model, (*given, _) = Sums(), tensors()
    program = torch.export.export(model, tuple(given), strict=True)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("fa4flex.second_pass.default") == 2
    for found, truth in zip(program.module()(*given), model(*given), strict=True):
        assert close(found, truth)


def test_traced_by_make_fx(seed: int) -> None:
    given = tensors()
    graph = make_fx(lambda *x: (of_mass(*x), of_rows(*x)))(*given)
    other = tensors()
    for found, truth in zip(graph(*other), (of_mass(*other), of_rows(*other)), strict=True):
        assert close(found, truth)


def test_a_second_derivative_of_a_graph_is_refused(seed: int) -> None:
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    given = tensors()
    with Watching():
        (dq,) = torch.autograd.grad(of_mass(*given).square().sum(), given[0], create_graph=True)
        with pytest.raises(UnsupportedError, match="second derivative of probabilities"):
            dq.sum().backward()


def test_rows_of_a_graph_are_checked_when_it_runs(seed: int) -> None:
    compiled = torch.compile(
        lambda q, k, lse, rows: fa4flex.probabilities(q, k, lse, rows), fullgraph=True, backend="aot_eager"
    )
    q, k, lse, _ = (x.detach() for x in tensors())
    assert close(compiled(q, k, lse, torch.tensor([6])), fa4flex.probabilities(q, k, lse, torch.tensor([-1])))
    with pytest.raises(InputError, match="beyond the 7 rows"):
        compiled(q, k, lse, torch.tensor([7]))
