"""The k largest scores of rows, by operations of torch: of equal ones lower units come first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa4flex.primitives.block_parts import ascending


def largest(scores: Tensor, k: int, forced: Tensor) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of the k largest scores of rows
    [..., C], of which none is -inf or NaN. forced: bool, units that are selected whatever their scores are,
    k of a row at most."""
    values = torch.where((scores > -math.inf) & ~forced, scores, -math.inf)  # not so NaN
    room = k - forced.sum(-1, keepdim=True)
    least = values.topk(k, -1).values.gather(-1, (room - 1).clamp(min=0))
    above, equal = values > least, values == least
    lowest = equal.cumsum(-1) <= room - above.sum(-1, keepdim=True)
    best = (above | (equal & lowest)) & (values > -math.inf) & (room > 0)
    counts, ids = ascending(best | forced, k)
    return ids, counts


def in_runs(runs: Tensor, units: int) -> Tensor:
    """bool [R, units]: those of units [0, a), [b, c) and [d, units), of runs [R, 4] = a, b, c, d."""
    at = torch.arange(units, device=runs.device)
    first, begin, end, last = runs.long().unsqueeze(-1).unbind(1)
    return (at < first) | ((at >= begin) & (at < end)) | (at >= last)
