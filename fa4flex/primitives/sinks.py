"""Attention sinks: one learnable logit per query head in the softmax's denominator.

    p[q, kv] = exp(s[q, kv]) / (exp(sink[h]) + sum_k exp(s[q, k]))      (gpt-oss, arXiv:2508.10925, section 2)

A sink takes weight and contributes no value. The LSE includes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fa4flex.errors import InputError
from fa4flex.primitives.base import check_device, kind_of, show

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Sinks:
    """`logits` [Hq], bfloat16, float16, float32 or float64, or a function that returns them at each call.

    They are not scaled and receive gradients. Pass a Parameter by a function (`lambda: self.sinks`), or
    with each call: its module may replace it (load_state_dict(assign=True), fully_shard), which would not be
    noticed here. Raises InputError for another rank or dtype, and for a Parameter.
    """

    logits: Tensor | Callable[[], Tensor]

    def __post_init__(self) -> None:
        if isinstance(self.logits, Parameter):
            raise InputError(
                "sinks that are a Parameter, which its module may replace",
                "a function that finds it at each call, or the Parameter with each call",
                "compile(sinks=lambda: self.sinks), attn(q, k, v, sinks=self.sinks) or fa4flex.nn.Attention",
            )
        if isinstance(self.logits, Tensor) or not callable(self.logits):
            _check_logits(self.logits)

    def now(self) -> Tensor:
        """The logits of this call. Raises InputError where a function returned something else."""
        if isinstance(self.logits, Tensor):
            return self.logits
        return _check_logits(self.logits())

    def check(self, q_heads: int, device: torch.device) -> None:
        """Raise InputError unless there is one logit per query head, on `device`."""
        logits = self.now()
        if logits.shape[0] != q_heads:
            raise InputError(
                f"{logits.shape[0]} sinks for {q_heads} query heads",
                "one logit per query head (not per KV head)",
                f"sinks.repeat_interleave({q_heads // logits.shape[0]}) gives each query head its KV head's"
                if q_heads % logits.shape[0] == 0
                else f"pass {q_heads} of them",
            )
        check_device("sinks", logits, "q", device, "move the sinks with .to(q.device)")

    def __repr__(self) -> str:
        return f"Sinks({show(self.logits)})"


def _check_logits(logits: Any) -> Tensor:
    if not isinstance(logits, Tensor) or logits.dtype not in _FLOATS:
        raise InputError(
            f"sinks of {kind_of(logits)}",
            "a floating tensor [query heads]",
            "convert: torch.as_tensor(sinks, dtype=torch.float32)",
        )
    if logits.layout is not torch.strided or logits.is_nested:
        raise InputError(
            f"sinks {'nested' if logits.is_nested else f'of layout {logits.layout}'}",
            "a strided tensor [query heads]",
            "convert them with .to_dense()",
        )
    if logits.ndim != 1:
        raise InputError(
            f"sinks of shape {list(logits.shape)}", "[query heads]", "flatten them to one logit per head"
        )
    return logits
