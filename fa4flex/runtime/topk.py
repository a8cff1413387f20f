"""The operator `fa4flex::topk`: the k largest scores of rows, by a kernel, or by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.primitives.kept import where_seen
from fa4flex.primitives.largest import largest
from fa4flex.primitives.units import Rule
from fa4flex.runtime.cuda import topk as kernels
from fa4flex.runtime.flex.choice import by_kernels


def topk(scores: Tensor, k: int, rule: list[int]) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of rows of scores [..., R, C].

    rule   numbers of a Rule: units that may be selected, and those that are selected whatever their scores
           are; none where all may be, and none must
    """
    given = Rule(*rule) if rule else None
    found = kernels.topk(scores, k, given) if by_kernels(scores) and kernels.takes(scores, k, given) else None
    if found is not None:
        return found
    if given is None:
        return largest(scores, k, None)
    mask = given.mask(scores.device)
    values = scores if mask is None else where_seen(scores, mask)
    return largest(values, k, given.forced(scores.device))


def topk_fake(scores: Tensor, k: int, rule: list[int]) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of what `topk` returns."""
    shape = scores.shape[:-1]
    return scores.new_empty((*shape, k), dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)
