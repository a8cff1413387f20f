"""Poolings and products that a GPU makes by one launch each, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fa4flex.kernels.scores.config import PIECE
from fa4flex.primitives.kept import observed
from fa4flex.primitives.pooled import group_sizes
from fa4flex.torch_internals import forward_ad, is_tracing
from ptxsim.active import simulating

NARROW = torch.bfloat16, torch.float16


def by_launch(*tensors: Tensor) -> bool:
    """True if operators with kernels take such tensors of a GPU. Where operations are transformed or
    intercepted, whoever does so sees operations of torch."""
    if not all(x.is_cuda or simulating() for x in tensors):
        return False
    kinds = {x.dtype for x in tensors}
    fits = len(kinds) == 1 and kinds <= set(NARROW) and all(x.shape[-1] % PIECE == 0 for x in tensors)
    if not fits or torch.compiler.is_compiling():
        return fits
    plain = all(type(x) in (Tensor, Parameter) for x in tensors)
    return plain and not (observed() or is_tracing() or forward_ad._current_level >= 0)


class PoolByLaunch(torch.autograd.Function):
    """Sums or means of blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int, how: str) -> Tensor:
        ctx.block, ctx.how, ctx.length = block, how, x.shape[2]
        return torch.ops.fa4flex.pool(x, block, how)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        rows, block, length = upstream, ctx.block, ctx.length
        if ctx.how == "mean":
            sizes = group_sizes(length, block, rows.device)
            rows = rows / (sizes if isinstance(sizes, int) else sizes.unsqueeze(1))
        each = rows.unsqueeze(3).expand(-1, -1, -1, block, -1).flatten(2, 3)
        return each[:, :, :length], None, None


class ProductsByLaunch(torch.autograd.Function):
    """scale * q.k of query heads that share those of k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale = scale
        return torch.ops.fa4flex.scores(q, k, scale)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        (q, k), heads = ctx.saved_tensors, ctx.saved_tensors[1].shape[1]
        of_q, of_k, _ = ctx.needs_input_grad
        groups = (upstream * ctx.scale).unflatten(1, (heads, -1)).flatten(2, 3)
        dq = dk = None
        if of_q:
            dq = (groups @ k.to(groups.dtype)).view(q.shape).to(q.dtype)
        if of_k:
            rows = q.to(groups.dtype).unflatten(1, (heads, -1)).flatten(2, 3)
            dk = (groups.transpose(-1, -2) @ rows).to(k.dtype)
        return dq, dk, None
