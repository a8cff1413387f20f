"""Masks along diagonals, against evaluation at shifted pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa4flex
from fa4flex.codegen.analyze.shifts import follows_diagonals
from fa4flex.codegen.evaluate import evaluate
from fa4flex.variants import causal, document, prefix_lm, sliding_window

TABLE = torch.arange(64)
MASKS: dict[str, tuple[Any, bool]] = {
    "causal": (causal, True),
    "window": (causal & sliding_window(9), True),
    "dilated": (lambda b, h, q, kv: (q - kv) % 3 == 0, True),
    "of heads": (lambda b, h, q, kv: q - kv < 4 * h, True),
    "farther end": (lambda b, h, q, kv: torch.maximum(q, kv + 2) - kv < 7, True),
    "prefix": (prefix_lm(9), False),
    "documents": (document(TABLE // 8), False),
    "sum": (lambda b, h, q, kv: q + kv < 40, False),
    "twice": (lambda b, h, q, kv: 2 * q >= kv, False),
    "even queries": (lambda b, h, q, kv: q % 2 == 0, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, alike = MASKS[name]
    program = fa4flex.compile(mask=mask).program
    assert follows_diagonals(program.facts.mask) is alike

    def values(step: int) -> torch.Tensor:
        symbols = {"b": 0, "h": 1, "q_len": 64, "kv_len": 64, "num_heads": 2}
        rows = torch.arange(step, step + 40)
        pairs = {"q": rows.view(-1, 1), "kv": rows.view(1, -1)}
        (result,) = evaluate([program.facts.mask], {**symbols, **pairs}, program.captured())
        return torch.as_tensor(result).expand(40, 40)

    assert all(torch.equal(values(0), values(step)) for step in range(1, 24)) is alike
