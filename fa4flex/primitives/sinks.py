"""Attention sinks: one learnable logit per query head in the softmax's denominator.

    p[q, kv] = exp(s[q, kv]) / (exp(sink[h]) + sum_k exp(s[q, k]))      (gpt-oss, arXiv:2508.10925, section 2)

A sink takes weight and contributes no value. The LSE includes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.base import kind_of, show

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Sinks:
    """`logits` [Hq], bfloat16, float16, float32 or float64; they are not scaled. Receives gradients.

    Raises InputError for another rank or dtype.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.logits, Tensor) or self.logits.dtype not in _FLOATS:
            raise InputError(
                f"sinks of {kind_of(self.logits)}",
                "a floating tensor [query heads]",
                "convert: torch.as_tensor(sinks, dtype=torch.float32)",
            )
        if self.logits.layout is not torch.strided or self.logits.is_nested:
            raise InputError(
                f"sinks {'nested' if self.logits.is_nested else f'of layout {self.logits.layout}'}",
                "a strided tensor [query heads]",
                "convert them with .to_dense()",
            )
        if self.logits.ndim != 1:
            raise InputError(
                f"sinks of shape {list(self.logits.shape)}",
                "[query heads]",
                "flatten them to one logit per head",
            )

    def check(self, q_heads: int, device: torch.device) -> None:
        """Raise InputError unless there is one logit per query head, on `device`."""
        if self.logits.numel() != q_heads:
            raise InputError(
                f"{self.logits.numel()} sinks for {q_heads} query heads",
                "one logit per query head (not per key/value head)",
                "repeat_interleave them by the ratio of query to key/value heads",
            )
        if self.logits.device != device:
            raise InputError(
                f"sinks on {self.logits.device}, q on {device}",
                "one device",
                "move the sinks with .to(q.device)",
            )

    def __repr__(self) -> str:
        return f"Sinks({show(self.logits)})"
