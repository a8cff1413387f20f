"""Masks and score mods under torch.compile: Dynamo traces their calls and their construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.variants import alibi, causal, document, prefix_lm, sliding_window, softcap

SIZE = 8
IDS = torch.arange(SIZE) // 3
SLOPES = torch.tensor([0.5, 0.25])
Q, KV, ZERO = torch.arange(SIZE).view(-1, 1), torch.arange(SIZE), torch.tensor(0)
BLOCKS = fa4flex.BlockMap.from_dense(torch.tril(torch.ones(2, 2)).bool(), 4)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="eager")
    return compiled


def called(mask: Any, q: Tensor, kv: Tensor) -> Tensor:
    result: Tensor = mask(ZERO, ZERO, q, kv, q_len=SIZE, kv_len=SIZE, num_heads=2)
    return result


MASKS = [
    causal() & sliding_window(3),
    ~causal() | prefix_lm(2) & document(IDS),
    (causal() & sliding_window(3)).bind(q_len=SIZE),
    BLOCKS & causal(),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_calls_of_masks_are_traced(mask: fa4flex.Mask) -> None:
    assert torch.equal(whole(lambda q, kv: called(mask, q, kv))(Q, KV), called(mask, Q, KV))


def test_calls_of_score_mods_are_traced() -> None:
    mod = alibi(SLOPES) >> softcap(20.0)

    def run(scores: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        result: Tensor = mod(scores, ZERO, h, q, kv, q_len=SIZE, kv_len=SIZE, num_heads=2)
        return result

    given = torch.randn(2, SIZE, SIZE), torch.arange(2).view(-1, 1, 1), Q, KV
    torch.testing.assert_close(whole(run)(*given), run(*given))


COMPOSITIONS: dict[str, Callable[[Tensor], fa4flex.Mask]] = {
    "of masks": lambda ids: MASKS[0] & MASKS[1],
    "of families": lambda ids: causal & sliding_window,
    "named": lambda ids: causal() & sliding_window(3),
    "tensor": lambda ids: document(ids) | prefix_lm(2),
    # Dynamo traces no ~ on objects; the method that it stands for is traced.
    "not": lambda ids: causal().__invert__(),
    "keyword": lambda ids: (causal() & sliding_window(window=3)).bind(q_len=SIZE),
    "function": lambda ids: causal() & (lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_masks_are_composed_inside_compiled_functions(name: str) -> None:
    def run(ids: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return called(COMPOSITIONS[name](ids), q, kv)

    assert torch.equal(whole(run)(IDS, Q, KV), run(IDS, Q, KV))


def test_a_call_reads_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, mod = causal() & sliding_window(3), alibi(SLOPES) >> softcap(20.0)

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("inspect.signature was called")

    monkeypatch.setattr("inspect.signature", never)
    called(mask, Q, KV)
    mod(torch.zeros(()), ZERO, ZERO, Q, KV, q_len=SIZE, kv_len=SIZE)
