"""Tiles of keys that are read, by bounds of their masses, whatever has computed these."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.kernels.planes.config import SLACK


class Masses(NamedTuple):
    """Bounds of what a row's softmax has in a tile, as logarithms of sums of exponentials of exact scores
    [B, Hq, Sq, T]. visited: tiles that have allowed keys, bool [B, Hkv, T]."""

    upper: Tensor
    lower: Tensor
    visited: Tensor


def needed(found: Masses, sinks: Tensor | None, tolerance: float) -> Tensor:
    """Tiles that are read, bool [B, Hkv, T]: all but those that hold together at most the tolerance of every
    row of the heads that share them. A tile of the largest mass of a row stays, so that no row has lost all
    of its keys."""
    upper, lower, visited = found
    total = lower.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(-1, 1, 1))
    masked = upper == -math.inf
    # NaN is more than any tolerance, and last in order.
    share = (upper - total).double().exp().masked_fill(masked, 0.0) * SLACK
    share, order = share.sort(-1)
    out = share.cumsum(-1) <= tolerance
    out[..., -1:] &= masked.gather(-1, order[..., -1:])
    left = torch.zeros_like(out).scatter(-1, order, out)
    heads = visited.shape[1]
    return visited & ~left.unflatten(1, (heads, -1)).all(3).all(2)
