"""Memory layouts of results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_output(q: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """An output [*q.shape[:-1], width] whose dimensions lie in memory in the order of q's."""
    return torch.empty_permuted(
        (*q.shape[:-1], width), outermost_first(q.stride()), dtype=dtype, device=q.device
    )


def output_layout(q: Tensor, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of `empty_output`, in a fraction of the time of asking torch for them."""
    shape, strides = (*q.shape[:-1], width), q.stride()
    if len(shape) == 4 and strides[0] >= strides[1] >= strides[2]:
        _, n, m, _ = shape
        row = max(width, 1)
        inner = max(m, 1) * row
        return shape, (max(n, 1) * inner, inner, row, 1)
    result, step = [1] * len(shape), max(width, 1)
    for i in reversed(outermost_first(strides)[:-1]):
        result[i] = step
        step *= max(shape[i], 1)
    return shape, tuple(result)


def laid_out(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient of x, copied where its dimensions do not lie in memory in the order of x's."""
    shape, strides = output_layout(x, x.shape[-1])
    return gradient if gradient.stride() == strides else x.new_empty_strided(shape, strides).copy_(gradient)


def outermost_first(strides: Sequence[int]) -> list[int]:
    """Dimensions by falling stride, as torch's flex_attention orders its output's: equal strides in the order
    of the dimensions, expanded dimensions inside all others. The last dimension is innermost in any case:
    kernels store rows."""
    last = len(strides) - 1
    return [*sorted(range(last), key=lambda i: strides[i], reverse=True), last]
