"""The k largest scores of rows, by operations of torch: of equal ones lower units come first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa4flex.primitives.block_parts import ascending


def largest(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of the k largest scores of rows
    [..., C], of which none is -inf or NaN. forced: bool, units that are selected whatever their scores are,
    k of a row at most."""
    selectable, room = scores > -math.inf, k  # not so NaN
    if forced is not None:
        forced = forced.expand(scores.shape)
        selectable, room = selectable & ~forced, k - forced.sum(-1, keepdim=True)
    values = torch.where(selectable, scores, -math.inf)
    best = values.topk(k, -1).values
    least = best[..., -1:] if forced is None else best.gather(-1, (room - 1).clamp(min=0))
    above, equal = values > least, values == least
    lowest = equal.cumsum(-1) <= room - above.sum(-1, keepdim=True)
    chosen = (above | (equal & lowest)) & (values > -math.inf)
    if forced is not None:
        chosen = (chosen & (room > 0)) | forced
    counts, ids = ascending(chosen, k)
    return ids, counts
