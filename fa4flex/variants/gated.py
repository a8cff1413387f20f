"""Gated attention: each element, row or head of the output is multiplied by the sigmoid of a gate.

    out[b, h, q, d] * sigmoid(gate[b, h, q, d])

Source: Qiu et al., "Gated Attention for Large Language Models", arXiv:2505.06708, section 3 (gates after the
output, by element or by head), as Qwen3-Next and Qwen3.5 have it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.output import OutputFunction, output_family
from fa4flex.variants._cases import Case, Drawn, Sizes, applied, show
from fa4flex.variants._common import FLOATS, INTEGERS, for_heads, table
from fa4flex.variants.causal import causal


@output_family
def gated(gate: Tensor, offsets: Tensor | None = None) -> OutputFunction:
    """gate: learnable floating tensor, before its sigmoid; its rank says which one:

    [B, H, Q, D]     by element
    [B, H, Q]        by row of a head
    [H]              by head

    With `offsets`, the cu_seqlens_q [N + 1] of packed sequences, it has their rows: [T, H, D] or [T, H]. H
    are query heads, D is the width of v. Raises InputError.
    """
    if offsets is not None:
        return _packed(gate, table("gated", "offsets", offsets, INTEGERS, (1,), "[N + 1]"))
    gate = table("gated", "gate", gate, FLOATS, (1, 3, 4), "[B, H, Q, D], [B, H, Q] or [H]")
    rank = gate.ndim

    def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
        return out * torch.sigmoid(gate[h] if rank == 1 else gate[(b, h, q_idx, d_idx)[:rank]])

    return for_heads(mod, gate.shape[0 if rank == 1 else 1])


def _packed(gate: Any, offsets: Tensor) -> OutputFunction:
    gate = table("gated", "gate", gate, FLOATS, (2, 3), "[T, H, D] or [T, H], with offsets")
    rank = gate.ndim

    def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
        return out * torch.sigmoid(gate[(offsets[b] + q_idx, h, d_idx)[:rank]])

    return for_heads(mod, gate.shape[1])


def definition(out: float, gate: float) -> float:
    return out / (1 + math.exp(-gate))


def _by_element(s: Sizes) -> Drawn:
    gate = s.learned(torch.randn(s.batch, s.heads, s.q_len, s.dim_v))
    return applied(s, gated, lambda x, b, h, q, d: definition(x, float(gate[b, h, q, d])), gate, mask=causal)


def _by_row(s: Sizes) -> Drawn:
    gate = s.learned(torch.randn(s.batch, s.heads, s.q_len))
    return applied(s, gated, lambda x, b, h, q, d: definition(x, float(gate[b, h, q])), gate)


def _by_head(s: Sizes) -> Drawn:
    gate = s.learned(torch.randn(s.heads))
    return applied(s, gated, lambda x, b, h, q, d: definition(x, float(gate[h])), gate, mask=causal)


CASES = (Case(_by_element), Case(_by_row), Case(_by_head, compiled=False))
PICTURE = None

if __name__ == "__main__":
    show(CASES)
