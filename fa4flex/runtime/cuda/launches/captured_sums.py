"""Memory for the gradients of captured tensors, and how these leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fa4flex.kernels.plan.captured_sums import CapturedSum


def memory_of(one: CapturedSum, q: Tensor) -> Tensor:
    """[copies, shape...] on q's device, zero where the kernel does not write every element."""
    make = q.new_empty if one.whole else q.new_zeros
    return make(one.shape, dtype=getattr(torch, one.dtype))


def result_of(one: CapturedSum, sums: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The gradient, in the shape and dtype of what it belongs to."""
    like = operands[one.slot]
    total = sums[0] if one.shape[0] == 1 else sums.sum(0)
    if like.ndim == 0:
        total = total[0]
    elif total.shape != like.shape:
        total = total[..., : like.shape[-1]].contiguous()
    return total.to(like.dtype)
