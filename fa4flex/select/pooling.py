"""Pooled tokens: a row for each block of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_device, kind_of, show
from fa4flex.primitives.pooled import EXTREMES, in_blocks, last_tokens, pooled, wide
from fa4flex.select.launched import PoolByLaunch, by_launch

How = Literal["mean", "sum", "max", "min", "last", "phases", "reversed"]


@dataclass(frozen=True, eq=False, repr=False)
class Pooled:
    """`values` [B, H, ceil(length / block), D], a row for each `block` of `length` tokens."""

    values: Tensor
    block: int
    length: int

    def beside(self, other: Pooled) -> Pooled:
        """Channels of both, one after the other. Raises InputError for other blocks or tokens."""
        own = self.block, self.length, self.values.shape[:3], self.values.device
        alike = isinstance(other, Pooled)
        if not alike or own != (other.block, other.length, other.values.shape[:3], other.values.device):
            raise InputError(
                f"{self!r} beside {other if alike else kind_of(other)}",
                "the same blocks of the same tokens",
                "pool both alike",
            )
        return replace(self, values=torch.cat((self.values, other.values), -1))

    def __repr__(self) -> str:
        return f"Pooled({show(self.values)}, {self.block}, {self.length})"


def pool(x: Tensor, block: int, how: How | Tensor = "mean") -> Pooled:
    """Rows for blocks of neighbouring tokens: of x [B, H, S, D], S tokens, [B, H, ceil(S / block), D].

    how  "mean", "sum", "max" or "min" of each channel over a block's tokens; "last", its last token; weights
         [block], or [S] or [..., S] for each token, the sum of weights times tokens; "phases" and "reversed",
         the tokens of a block side by side, in order and the other way round, [.., block * D]: products of
         "reversed" queries and "phases" of keys are sums along antidiagonals

    The last block is of the tokens that there are; with "phases" and "reversed", zeros stand for others.
    Sums are in float32 at least, results in x's dtype. Differentiable. Raises InputError.
    """
    check_tokens("pool", x)
    if not is_count(block):
        raise InputError(f"block={block!r}", "a positive int, in tokens", "e.g. block=64")
    return Pooled(_pooled(x, block, how), block, x.shape[2])


def check_tokens(name: str, x: Any) -> None:
    """Raise InputError unless x is a floating tensor [B, H, S, D] of a token or more."""
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point() or 0 in x.shape[1:]:
        what = f"{kind_of(x)}{list(x.shape) if isinstance(x, Tensor) else ''}"
        raise InputError(
            f"{name} of {what}", "floating [B, H, S, D], S at least 1", "transpose other layouts: a view"
        )


def _pooled(x: Tensor, block: int, how: Any) -> Tensor:
    if isinstance(how, Tensor):
        return _weighted(x, block, how)
    if how == "last":
        return x.index_select(2, last_tokens(x.shape[2], block, x.device))
    if how in _SIDE_BY_SIDE:
        blocks = in_blocks(x, block, 0.0)
        return (blocks.flip(3) if how == "reversed" else blocks).flatten(3)
    if not isinstance(how, str) or how not in _LAUNCHED:
        raise InputError(
            f"how={how!r}",
            "mean, sum, max, min, last, phases, reversed, or a tensor of weights",
            'leave it at "mean", or pass weights of the tokens of a block',
        )
    if by_launch(x):
        if not (torch.is_grad_enabled() and x.requires_grad):
            return torch.ops.fa4flex.pool(x, block, how)
        if how not in EXTREMES:
            return PoolByLaunch.apply(x, block, how)
    return pooled(x, block, how)


_LAUNCHED = "mean", "sum", "max", "min"
_SIDE_BY_SIDE = "phases", "reversed"


def _weighted(x: Tensor, block: int, weights: Tensor) -> Tensor:
    length = x.shape[2]
    of_block = weights.ndim == 1 and weights.shape[0] == block
    of_tokens = 0 < weights.ndim < 4 and weights.shape[-1] == length
    of_tokens = of_tokens and all(
        given in (1, size) for given, size in zip(weights.shape[-2::-1], x.shape[1::-1], strict=False)
    )
    if not weights.is_floating_point() or not (of_block or of_tokens):
        raise InputError(
            f"weights {kind_of(weights)}{list(weights.shape)} of {length} tokens in blocks of {block}",
            f"floating, [{block}], or [.., {length}] that broadcasts with [B, H, {length}]",
            "a softmax over a block's tokens is .softmax(-1) of logits [.., blocks, block], flattened",
        )
    check_device("weights", weights, "x", x.device, "move the weights to x")
    each = weights.repeat(-(-length // block))[:length] if of_block and block != length else weights
    kind = torch.promote_types(wide(x), weights.dtype)
    return in_blocks(x.to(kind) * each.to(kind).unsqueeze(-1), block, 0.0).sum(3).to(x.dtype)
