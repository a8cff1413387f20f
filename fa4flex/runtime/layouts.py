"""Memory layouts of results."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_output(q: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """An output for q, its rows in the order of q's: a transposed q gives a transposed output."""
    steps = q.stride()[:-1]
    order = sorted(range(q.ndim - 1), key=lambda i: steps[i], reverse=True)
    if any(step == 0 for step in steps):  # an expanded q has no order of its own
        order = list(range(q.ndim - 1))
    size = (*q.shape[:-1], width)
    return torch.empty_permuted(size, [*order, q.ndim - 1], dtype=dtype, device=q.device)
