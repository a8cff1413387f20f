"""Rows for blocks of neighbouring tokens, and scaled products, by operations of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fa4flex.primitives.kept import kept

EXTREMES: dict[str, tuple[float, Callable[[Tensor, int], Tensor]]] = {
    "max": (-torch.inf, lambda x, dim: x.amax(dim)),
    "min": (torch.inf, lambda x, dim: x.amin(dim)),
}


def pooled(x: Tensor, block: int, how: str) -> Tensor:
    """Rows [B, H, ceil(S / block), D] of tokens x [B, H, S, D]: "mean", "sum", "max" or "min" of blocks, the
    last of which is of the tokens that there are. Sums are in float32 at least."""
    if how in EXTREMES:
        fill, function = EXTREMES[how]
        return function(in_blocks(x, block, fill), 3)
    total = in_blocks(x, block, 0.0).sum(3, dtype=wide(x))  # a wider copy of x would be written and read
    if how == "mean":
        sizes = group_sizes(x.shape[2], block, x.device)
        total = total / (sizes if isinstance(sizes, int) else sizes.unsqueeze(1))
    return total.to(x.dtype)


def in_blocks(x: Tensor, block: int, fill: float) -> Tensor:
    """x [B, H, S, D] as [B, H, blocks, block, D], with `fill` behind the last token."""
    more = -x.shape[2] % block
    if more:
        x = torch.nn.functional.pad(x, (0, 0, 0, more), value=fill)
    return x.unflatten(2, (-1, block))


def group_sizes(length: int, size: int, device: torch.device) -> int | Tensor:
    """Members of each group of neighbours among so many, of which the last one may have fewer."""
    if length % size == 0:
        return size

    def make() -> Tensor:
        return (length - torch.arange(0, length, size, device=device)).clamp(max=size)

    return kept(("sizes", length, size), device, make)


def last_tokens(length: int, block: int, device: torch.device) -> Tensor:
    """int64: number of the last token of each block of so many."""

    def make() -> Tensor:
        return torch.arange(block - 1, length + block - 1, block, device=device).clamp(max=length - 1)

    return kept(("last", length, block), device, make)


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q.k as float32 or float64 [B, Hq, R, C], of q [B, Hq, R, D] and k [B, Hk, C, D]."""
    kind = wide(q, k)
    groups = q.to(kind).unflatten(1, (k.shape[1], -1))
    made = groups.flatten(2, 3) @ k.to(kind).transpose(-1, -2)
    return made.unflatten(2, groups.shape[2:4]).flatten(1, 2) * scale


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32
