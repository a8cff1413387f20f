"""The operator `fa4flex::topk`: the k largest scores of rows, by a kernel, or by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.primitives.largest import in_runs, largest
from fa4flex.runtime.compute import on_gpu
from fa4flex.runtime.cuda import topk as kernels
from fa4flex.runtime.flex.choice import by_flex


def topk(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of rows of scores [..., R, C].

    forced   int32 [R, 4]: units [0, a), [b, c) and [d, C) of a row are selected whatever their scores are
    """
    if by_kernel(scores, k):
        return kernels.topk(scores, k, forced)
    shape = scores.shape[-2:]
    runs = scores.new_zeros(shape, dtype=torch.bool) if forced is None else in_runs(forced, shape[1])
    return largest(scores, k, runs.expand(scores.shape))


def by_kernel(scores: Tensor, k: int) -> bool:
    """True if a kernel selects k of each row."""
    return on_gpu(scores) and not by_flex("auto", scores) and kernels.takes(scores, k)


def topk_fake(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of what `topk` returns."""
    shape = scores.shape[:-1]
    return scores.new_empty((*shape, k), dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)
