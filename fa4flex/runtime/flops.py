"""Matrix-multiplication FLOPs of both operators, for torch.utils.flop_counter.FlopCounterMode.

They count what torch's formulas count for its own attention: every (query, key) pair of a sequence, masked or
not; two products forward, five backward, of which one computes the scores again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.operators import OPERATORS
from fa4flex.runtime.packing import sequence_lengths
from fa4flex.torch_internals import modes_of_dispatch

COUNTER = "torch.utils.flop_counter"
_COMMON = len(OPERATORS["attention"].rows)
"""Arguments that both operators of a forward pass have."""
_registered = False


def follow() -> None:
    """Register the formulas once torch's counter is loaded, also with counters that are counting already."""
    global _registered
    counting = sys.modules.get(COUNTER)
    if _registered or counting is None or not hasattr(counting, "FlopCounterMode"):
        return
    _registered = True
    formulas = {
        torch.ops.fa4flex.attention: forward_flops,
        torch.ops.fa4flex.attention_with_statistics: forward_flops,
        torch.ops.fa4flex.attention_gradients: backward_flops,
        torch.ops.fa4flex.attention_backward: backward_flops,
    }
    for operator, formula in formulas.items():
        counting.register_flop_formula(operator, get_raw=True)(formula)
    for mode in modes_of_dispatch():
        counter = getattr(mode, "counter", None)  # it copied torch's formulas when it was made
        if isinstance(counter, counting.FlopCounterMode):
            counter.flop_registry.update(formulas)


def forward_flops(*arguments: Any, **_: Any) -> int:
    value = OPERATORS["attention"].named(arguments[:_COMMON])
    q, k, v = (value[name] for name in "qkv")
    return 2 * _scores(q, k, sequence_lengths(value)) * (q.shape[-1] + v.shape[-1])


def backward_flops(*arguments: Any, **_: Any) -> int:
    value = OPERATORS["attention_gradients"].named(arguments)
    q, k, v = (value[name] for name in "qkv")
    return 2 * _scores(q, k, sequence_lengths(value)) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _scores(q: Tensor, k: Tensor, lengths: Sequence[Tensor | None]) -> int:
    """Scores of all heads and sequences. Where lengths are not known, the most that there can be."""
    cu_q, cu_k, used_q, used_k = lengths
    if cu_q is None or cu_k is None:
        batch, heads, q_len = q.shape[:3]
        return heads * _pairs(_used(used_q, batch, q_len), _used(used_k, batch, k.shape[2]))
    queries, keys = _packed(cu_q, used_q), _packed(cu_k, used_k)
    if queries is None or keys is None:
        return q.shape[1] * q.shape[0] * k.shape[0]
    return q.shape[1] * _pairs(queries, keys)


def _pairs(queries: list[int], keys: list[int]) -> int:
    return sum(n * m for n, m in zip(queries, keys, strict=True))


def _used(used: Tensor | None, batch: int, length: int) -> list[int]:
    known = None if used is None else _read(used)
    return [length] * batch if known is None else known


def _packed(starts: Tensor, used: Tensor | None) -> list[int] | None:
    return _read(starts.diff() if used is None else used)


def _read(lengths: Tensor) -> list[int] | None:
    """None where a tensor has no contents."""
    if lengths.is_meta or torch.compiler.is_compiling() or type(lengths) is not Tensor:
        return None
    results: list[int] = lengths.tolist()
    return results
