"""The operator `fa4flex::topk`: the k largest scores of rows, by a kernel, or by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.primitives.largest import in_runs, largest
from fa4flex.runtime.cuda import topk as kernels
from fa4flex.runtime.flex.choice import by_kernels


def topk(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of rows of scores [..., R, C].

    forced   int32 [R, 4]: units [0, a), [b, c) and [d, C) of a row are selected whatever their scores are
    """
    found = kernels.topk(scores, k, forced) if by_kernels(scores) and kernels.takes(scores, k) else None
    if found is not None:
        return found
    shape = scores.shape[-2:]
    runs = scores.new_zeros(shape, dtype=torch.bool) if forced is None else in_runs(forced, shape[1])
    return largest(scores, k, runs.expand(scores.shape))


def topk_fake(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of what `topk` returns."""
    shape = scores.shape[:-1]
    return scores.new_empty((*shape, k), dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)
